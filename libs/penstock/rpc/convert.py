"""Protobuf stays at the door: plain dataclasses of `kv` to and from messages."""

from __future__ import annotations

from penstock.kv.identity import KvSpec
from penstock.v1 import common_pb2


def spec_from_message(message: common_pb2.KvSpec) -> KvSpec:
    """KvSpec from the wire."""
    return KvSpec(
        message.model, message.tokenizer, message.layout, message.dtype, message.block_size, message.block_bytes
    )


def spec_to_message(spec: KvSpec) -> common_pb2.KvSpec:
    """KvSpec for the wire."""
    return common_pb2.KvSpec(
        model=spec.model,
        tokenizer=spec.tokenizer,
        layout=spec.layout,
        dtype=spec.dtype,
        block_size=spec.block_size,
        block_bytes=spec.block_bytes,
    )
