"""The description of one model's blocks, and its form on the wire."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """The properties on which two processes must agree before they exchange KV."""

    model: str
    """sha256 of the weights and the configuration, hex."""
    tokenizer: str
    """sha256 of tokenizer.json, hex."""
    layout: str
    """How the bytes of one block are ordered."""
    dtype: str
    block_size: int
    """Tokens per block."""
    block_bytes: int

    def difference(self, other: KvSpec) -> str | None:
        """The first field in which the two differ, as a sentence, or None when they agree."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {mine!r} here and {theirs!r} there"
        return None


def spec_from_message(message: common_pb2.KvSpec) -> KvSpec:
    """Converts a KvSpec from the wire, without checks."""
    return KvSpec(
        model=message.model,
        tokenizer=message.tokenizer,
        layout=message.layout,
        dtype=message.dtype,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
    )


def spec_to_message(spec: KvSpec) -> common_pb2.KvSpec:
    """A KvSpec for the wire."""
    return common_pb2.KvSpec(
        model=spec.model,
        tokenizer=spec.tokenizer,
        layout=spec.layout,
        dtype=spec.dtype,
        block_size=spec.block_size,
        block_bytes=spec.block_bytes,
    )
