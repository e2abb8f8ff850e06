"""Weights from safetensors files, memory-mapped, cast and stacked the way the decoder wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    CheckpointError,
    LayerNames,
    ModelConfig,
    TensorInfo,
    layer_names,
)
from penstock.engine.layers.embedding import Embedding, StoredTable
from penstock.engine.layers.feedforward import Dense, Routed
from penstock.engine.layers.linear import Matrix
from penstock.engine.layers.stacks import Keep, Stack, as_it_is
from penstock.engine.layers.stored import numbers, read_tensor
from penstock.engine.layers.weights import LatentWeights, LayerWeights, SideBySide, Weights

Source = Callable[[TensorInfo], Tensor]
"""Brings a tensor to the device, in its stored type and memory of its own."""
KeepHeads = Callable[[Stack], SideBySide]
"""As Keep, of the matrices that latent attention has for each head."""


class _Files:
    """Tensors by name out of the open files of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, stack: ExitStack, source: Source | None
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._dtype = dtype
        self._device = device
        self.adds = checkpoint.adds
        self._last: tuple[TensorInfo, Tensor] | None = None
        """The tensor of which parts are being read."""
        self._open: dict[Path, Any] = {}
        for file in checkpoint.weight_files:
            try:
                self._open[file] = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(file, str(error)) from None

    def one(self, name: str) -> Tensor:
        found = [self._read(piece, self._dtype) for piece in self._checkpoint.pieces(name)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def exact(self, name: str) -> Tensor:
        """In float32."""
        return self._read(self._checkpoint.tensors[name], torch.float32)

    def norm(self, name: str) -> Tensor:
        """The factors of a norm: its weight, or 1 + weight in float32 for families with an offset."""
        if self._checkpoint.config.norm_offset:
            return self._read(self._checkpoint.tensors[name], torch.float32).add_(1.0)
        return self.one(name)

    def matrix(self, prefix: str, *names: str) -> Tensor:
        """[in, out]: the projections side by side."""
        return self.stacked(stack_of(self._checkpoint, "", prefix, *names))

    def stacked(self, stack: Stack) -> Tensor:
        """[in, out]."""
        return stack.joined(lambda part: self._read(part, self._dtype))

    def bias(self, present: bool, prefix: str, *names: str) -> Tensor | None:
        return torch.cat([self.one(f"{prefix}{name}.bias") for name in names]) if present else None

    def _read(self, stored: TensorInfo, dtype: torch.dtype) -> Tensor:
        found = numbers(stored, self._stored)
        copy = self._source is None and stored.scale is None
        return found.to(self._device, dtype, copy=copy)

    def _stored(self, info: TensorInfo) -> Tensor:
        if self._checkpoint.part is not None:
            return read_tensor(info)
        whole = info.whole
        if whole is not None:
            if self._last is None or self._last[0] != whole:
                self._last = whole, self._stored(whole)
            number = (info.offset - whole.offset) // info.nbytes
            return self._last[1][number]
        if self._source is not None:
            return self._source(info)
        tensor: Tensor = self._open[info.file].get_tensor(info.name)
        return tensor


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    keep: Keep = as_it_is,
    keep_heads: KeepHeads | None = None,
    table: StoredTable | None = None,
    source: Source | None = None,
    compute: torch.dtype | None = None,
) -> Weights:
    """Copies the weights that this process has into new memory, as `dtype` on `device`; `keep` chooses the form of
    dense layers' matrices, and `keep_heads` of those that latent attention has for each head. With `table` the
    embedding stays there; without `source` this call reads the files itself.
    `compute` is the type of activations, where that is another one.

    Raises CheckpointError.
    """
    config = checkpoint.config
    with ExitStack() as stack:
        files = _Files(checkpoint, dtype, device, stack, source)

        def kept(own: Stack, bias: Tensor | None = None) -> tuple[Matrix, Tensor | None]:
            return keep(own, lambda: files.stacked(own), bias)

        embedding = Embedding(files.one(EMBEDDING) if table is None else table, dtype, config.embedding_scale)
        head = kept(head_stack(checkpoint))[0] if checkpoint.ends else None
        layers = [
            _layer(files, checkpoint, number, keep=kept, keep_heads=keep_heads, compute=compute or dtype)
            for number in checkpoint.layers
        ]
        norm = files.norm("model.norm.weight")
        weights = Weights(embedding, layers, norm, head, checkpoint.layers.start)
        if config.experts is not None and (device.type == "cpu" or checkpoint.part is not None):
            weights.count_in(np.zeros((len(layers), config.experts.count), np.int64))
        return weights


def stack_of(checkpoint: Checkpoint, name: str, prefix: str, *names: str) -> Stack:
    """The stack `name` of the matrices `names`."""
    return Stack(name, tuple(piece for part in names for piece in checkpoint.pieces(f"{prefix}{part}.weight")))


def head_stack(checkpoint: Checkpoint) -> Stack:
    """The last matrix."""
    return Stack("head", checkpoint.pieces(EMBEDDING if checkpoint.config.tied else HEAD))


def layer_stacks(checkpoint: Checkpoint, number: int) -> dict[str, Stack]:
    """The matrices of a layer, those of its experts apart, by their names there."""
    config, prefix = checkpoint.config, f"model.layers.{number}."
    names = layer_names(config)
    parts = {"qkv": names.qkv, "out": (names.out,)}
    if config.latent is not None and config.latent.query_rank is not None and names.latent is not None:
        parts["query"] = (names.latent.query,)
    if not _routed(config, number):
        parts |= {"gate_up": names.gate_up, "down": (names.down,)}
    elif config.experts is not None and config.experts.shared_size:
        parts |= {"gate_up": names.shared_gate_up, "down": (names.shared_down,)}
    return {name: stack_of(checkpoint, f"{number}.{name}", prefix, *some) for name, some in parts.items()}


def latent_stacks(checkpoint: Checkpoint, number: int) -> dict[str, Stack]:
    """The matrices `keys` and `values` that latent attention has in a layer for each head, side by side; see
    LatentWeights."""
    latent, names = checkpoint.config.latent, layer_names(checkpoint.config).latent
    if latent is None or names is None:
        return {}
    pieces = checkpoint.pieces(f"model.layers.{number}.{names.keys_values}.weight")
    size = latent.plain_dim + latent.value_dim
    begins = [(piece, begin) for piece in pieces for begin in range(0, piece.shape[0], size)]
    keys = tuple(piece.cut(0, range(begin, begin + latent.plain_dim)) for piece, begin in begins)
    values = tuple(piece.cut(0, range(begin + latent.plain_dim, begin + size)) for piece, begin in begins)
    return {
        "keys": Stack(f"{number}.keys", keys, turned=True, exact=True),
        "values": Stack(f"{number}.values", values, exact=True),
    }


def expert_stacks(checkpoint: Checkpoint, number: int, name: str) -> list[Stack]:
    """The matrices `gate_up` or `down` of a layer's experts, one for each."""
    config, prefix = checkpoint.config, f"model.layers.{number}."
    if config.experts is None or not _routed(config, number):
        return []
    names, every = layer_names(config), [held.number for held in config.experts.own(number)]
    own = {"gate_up": names.expert_gate_up, "down": (names.expert_down,)}[name]
    whole = {"gate_up": names.all_gate_up, "down": names.all_down}[name]
    if whole is not None:
        tables = checkpoint.pieces(f"{prefix}{whole}")
        return [
            Stack(f"{number}.{name}.{expert}", tuple(table.part(expert) for table in tables), turned=True)
            for expert in every
        ]
    return [
        stack_of(checkpoint, f"{number}.{name}.{expert}", prefix, *[part.format(expert) for part in own])
        for expert in every
    ]


def all_stacks(checkpoint: Checkpoint) -> Iterator[Stack]:
    """Every matrix that `load_weights` asks `keep` or `keep_heads` about."""
    if checkpoint.ends:
        yield head_stack(checkpoint)
    for number in checkpoint.layers:
        yield from layer_stacks(checkpoint, number).values()
        yield from latent_stacks(checkpoint, number).values()
        for name in ("gate_up", "down"):
            yield from expert_stacks(checkpoint, number, name)


_Kept = Callable[[Stack, Tensor | None], tuple[Matrix, Tensor | None]]


def _layer(
    files: _Files,
    checkpoint: Checkpoint,
    number: int,
    *,
    keep: _Kept,
    keep_heads: KeepHeads | None,
    compute: torch.dtype,
) -> LayerWeights:
    config, prefix = checkpoint.config, f"model.layers.{number}."
    names, stacks = layer_names(config), layer_stacks(checkpoint, number)
    qkv, qkv_bias = keep(stacks["qkv"], _input_bias(files, config, names, prefix))
    out, out_bias = keep(stacks["out"], files.bias(config.o_bias and checkpoint.adds, prefix, names.out))

    def norm(name: str) -> Tensor:
        return files.norm(f"{prefix}{name}.weight")

    return LayerWeights(
        input_norm=norm(names.input_norm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=_head_norms(config, norm(names.q_norm), norm(names.k_norm)) if config.qk_norm else None,
        latent=_latent(files, checkpoint, number, stacks=stacks, keep=keep, keep_heads=keep_heads, compute=compute),
        out=out,
        out_bias=out_bias,
        attention_post_norm=norm(names.attention_post_norm) if config.post_norms else None,
        mlp_norm=norm(names.mlp_norm),
        mlp=_routed_block(files, checkpoint, number, stacks=stacks, keep=keep, compute=compute)
        if _routed(config, number)
        else _dense_block(files, config, names, prefix, stacks=stacks, keep=keep),
        mlp_post_norm=norm(names.mlp_post_norm) if config.post_norms else None,
    )


def _head_norms(config: ModelConfig, query: Tensor, key: Tensor) -> Tensor:
    return torch.cat((query.expand(config.n_heads, -1), key.expand(config.n_kv_heads, -1)))


def _routed(config: ModelConfig, number: int) -> bool:
    return config.experts is not None and config.experts.layers[number]


def _dense_block(
    files: _Files, config: ModelConfig, names: LayerNames, prefix: str, *, stacks: dict[str, Stack], keep: _Kept
) -> Dense:
    gate_up, gate_up_bias = keep(stacks["gate_up"], files.bias(config.mlp_bias, prefix, *names.gate_up))
    down, down_bias = keep(stacks["down"], files.bias(config.mlp_bias and files.adds, prefix, names.down))
    return Dense(gate_up, gate_up_bias, down, down_bias)


def _input_bias(files: _Files, config: ModelConfig, names: LayerNames, prefix: str) -> Tensor | None:
    """Of what reads the hidden state. Queries that are made from it have none where keys and values are latent."""
    latent = config.latent
    if latent is None or latent.query_rank is not None or not config.qkv_bias:
        return files.bias(config.qkv_bias, prefix, *names.qkv)
    own = files.one(f"{prefix}{names.qkv[-1]}.bias")
    return torch.cat((own.new_zeros(config.n_heads * config.head_dim), own))


def _latent(
    files: _Files,
    checkpoint: Checkpoint,
    number: int,
    *,
    stacks: dict[str, Stack],
    keep: _Kept,
    keep_heads: KeepHeads | None,
    compute: torch.dtype,
) -> LatentWeights | None:
    config, prefix = checkpoint.config, f"model.layers.{number}."
    latent, own = config.latent, layer_names(config).latent
    if latent is None or own is None:
        return None
    if keep_heads is None:
        both = files.one(f"{prefix}{own.keys_values}.weight").to(compute)
        both = both.view(config.n_heads, latent.plain_dim + latent.value_dim, latent.rank)
        keys: Tensor | SideBySide = both[:, : latent.plain_dim].contiguous()
        values: Tensor | SideBySide = both[:, latent.plain_dim :].transpose(1, 2).contiguous()
    else:
        keys, values = (keep_heads(stack) for stack in latent_stacks(checkpoint, number).values())
    asked = "query" in stacks
    return LatentWeights(
        norm=files.norm(f"{prefix}{own.norm}.weight"),
        heads=config.n_heads,
        keys=keys,
        values=values,
        query_norm=files.norm(f"{prefix}{own.query_norm}.weight") if asked else None,
        query=keep(stacks["query"], None)[0] if asked else None,
    )


def _routed_block(
    files: _Files,
    checkpoint: Checkpoint,
    number: int,
    *,
    stacks: dict[str, Stack],
    keep: _Kept,
    compute: torch.dtype,
) -> Routed:
    config, prefix = checkpoint.config, f"model.layers.{number}."
    names, experts = layer_names(config), config.experts
    assert experts is not None
    shared = None
    if experts.shared_size:
        shared = Dense(keep(stacks["gate_up"], None)[0], None, keep(stacks["down"], None)[0], None)
    return Routed(
        router=files.matrix(prefix, names.router).to(compute),
        gate_up=_all_of(expert_stacks(checkpoint, number, "gate_up"), keep),
        down=_all_of(expert_stacks(checkpoint, number, "down"), keep),
        rule=experts,
        held=experts.own(number),
        correction=files.exact(f"{prefix}{names.router_bias}") if experts.corrected else None,
        shared=shared,
    )


def _all_of(stacks: Sequence[Stack], keep: _Kept) -> Tensor | list[Matrix]:
    """The experts' matrices: tensors in one, others in a list."""
    first, _ = keep(stacks[0], None)
    if not isinstance(first, Tensor):
        return [first, *(keep(stack, None)[0] for stack in stacks[1:])]
    every = first.new_empty(len(stacks), *first.shape)
    every[0] = first
    for number, stack in enumerate(stacks[1:], 1):
        matrix, _ = keep(stack, None)
        assert isinstance(matrix, Tensor)
        every[number] = matrix
    return every
