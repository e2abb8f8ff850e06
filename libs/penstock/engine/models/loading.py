"""Weights from safetensors files, memory-mapped, cast and stacked the way the decoder wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import (
    EMBEDDING,
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
from penstock.engine.layers.weights import LayerWeights, Weights

Source = Callable[[TensorInfo], Tensor]
"""Brings a tensor to the device, in its stored type and memory of its own."""


class _Files:
    """Tensors by name out of the open files of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, stack: ExitStack, source: Source | None
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, Any] = {}
        for file in checkpoint.weight_files:
            try:
                self._open[file] = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(file, str(error)) from None

    def one(self, name: str) -> Tensor:
        return self._read(self._checkpoint.tensors[name], self._dtype)

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
        return torch.cat([self._read(part, self._dtype) for part in stack.parts]).t().contiguous()

    def bias(self, present: bool, prefix: str, *names: str) -> Tensor | None:
        return torch.cat([self.one(f"{prefix}{name}.bias") for name in names]) if present else None

    def _read(self, stored: TensorInfo, dtype: torch.dtype) -> Tensor:
        if self._source is not None:
            return self._source(stored).to(dtype)
        tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        return tensor.to(self._device, dtype, copy=True)


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    keep: Keep = as_it_is,
    table: StoredTable | None = None,
    source: Source | None = None,
) -> Weights:
    """Copies all weights into new memory, as `dtype` on `device`; `keep` chooses the form of dense layers' matrices.
    With `table` the embedding stays there; without `source` this call reads the files itself.

    Raises CheckpointError.
    """
    config = checkpoint.config
    with ExitStack() as stack:
        files = _Files(checkpoint, dtype, device, stack, source)

        def kept(own: Stack, bias: Tensor | None = None) -> tuple[Matrix, Tensor | None]:
            return keep(own, lambda: files.stacked(own), bias)

        embedding = Embedding(files.one(EMBEDDING) if table is None else table, dtype, config.embedding_scale)
        head, _ = kept(head_stack(checkpoint))
        layers = [_layer(files, checkpoint, number, kept) for number in range(config.n_layers)]
        return Weights(embedding, layers, files.norm("model.norm.weight"), head)


def stack_of(checkpoint: Checkpoint, name: str, prefix: str, *names: str) -> Stack:
    """The stack `name` of the matrices `names`."""
    return Stack(name, tuple(checkpoint.tensors[f"{prefix}{part}.weight"] for part in names))


def head_stack(checkpoint: Checkpoint) -> Stack:
    """The last matrix."""
    return Stack("head", (checkpoint.tensors[EMBEDDING if checkpoint.config.tied else "lm_head.weight"],))


def layer_stacks(checkpoint: Checkpoint, number: int) -> dict[str, Stack]:
    """The matrices of a dense layer, by their names there."""
    names, prefix = layer_names(checkpoint.config.architecture), f"model.layers.{number}."
    parts = {"qkv": names.qkv, "out": (names.out,)}
    if not _routed(checkpoint.config, number):
        parts |= {"gate_up": names.gate_up, "down": (names.down,)}
    return {name: stack_of(checkpoint, f"{number}.{name}", prefix, *some) for name, some in parts.items()}


def all_stacks(checkpoint: Checkpoint) -> Iterator[Stack]:
    """Every matrix that `load_weights` asks `keep` about."""
    yield head_stack(checkpoint)
    for number in range(checkpoint.config.n_layers):
        yield from layer_stacks(checkpoint, number).values()


_Kept = Callable[[Stack, Tensor | None], tuple[Matrix, Tensor | None]]


def _layer(files: _Files, checkpoint: Checkpoint, number: int, keep: _Kept) -> LayerWeights:
    config, prefix = checkpoint.config, f"model.layers.{number}."
    names, stacks = layer_names(config.architecture), layer_stacks(checkpoint, number)
    qkv, qkv_bias = keep(stacks["qkv"], files.bias(config.qkv_bias, prefix, *names.qkv))
    out, out_bias = keep(stacks["out"], files.bias(config.o_bias, prefix, names.out))

    def norm(name: str) -> Tensor:
        return files.norm(f"{prefix}{name}.weight")

    return LayerWeights(
        input_norm=norm(names.input_norm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=_head_norms(config, norm(names.q_norm), norm(names.k_norm)) if config.qk_norm else None,
        out=out,
        out_bias=out_bias,
        attention_post_norm=norm(names.attention_post_norm) if config.post_norms else None,
        mlp_norm=norm(names.mlp_norm),
        mlp=_routed_block(files, config, names, number)
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
    down, down_bias = keep(stacks["down"], files.bias(config.mlp_bias, prefix, names.down))
    return Dense(gate_up, gate_up_bias, down, down_bias)


def _routed_block(files: _Files, config: ModelConfig, names: LayerNames, number: int) -> Routed:
    prefix, experts = f"model.layers.{number}.", config.experts
    assert experts is not None
    router = files.matrix(prefix, names.router)
    gate_up = router.new_empty(experts.count, config.hidden_size, 2 * experts.intermediate_size)
    down = router.new_empty(experts.count, experts.intermediate_size, config.hidden_size)
    for expert in range(experts.count):
        gate_up[expert] = files.matrix(prefix, *[name.format(expert) for name in names.expert_gate_up])
        down[expert] = files.matrix(prefix, names.expert_down.format(expert))
    return Routed(router, gate_up, down, experts.per_token, experts.normalised)
