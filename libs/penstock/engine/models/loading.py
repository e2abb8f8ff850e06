"""Weights from safetensors files, memory-mapped, cast and stacked the way the decoder wants them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import Checkpoint, CheckpointError, LayerNames, ModelConfig, layer_names
from penstock.engine.layers.feedforward import Dense, Routed
from penstock.engine.layers.linear import Matrix
from penstock.engine.models.decoder import LayerWeights, Weights

Keep = Callable[[Tensor, Tensor | None], tuple[Matrix, Tensor | None]]
"""What becomes of a matrix [in, out] and its bias."""


class _Files:
    """Tensors by name out of the open files of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, Any] = {}
        for file in checkpoint.weight_files:
            try:
                self._open[file] = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(file, str(error)) from None

    def one(self, name: str) -> Tensor:
        return self._read(name, self._dtype)

    def norm(self, name: str) -> Tensor:
        """What the norm multiplies by, see LayerWeights."""
        if self._checkpoint.config.norm_offset:
            return self._read(name, torch.float32).add_(1.0)
        return self.one(name)

    def matrix(self, prefix: str, *names: str) -> Tensor:
        """[in, out]: the projections side by side."""
        return torch.cat([self.one(f"{prefix}{name}.weight") for name in names]).t().contiguous()

    def bias(self, present: bool, prefix: str, *names: str) -> Tensor | None:
        return torch.cat([self.one(f"{prefix}{name}.bias") for name in names]) if present else None

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self._checkpoint.tensors[name]
        tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        return tensor.to(self._device, dtype, copy=True)


def as_it_is(matrix: Tensor, bias: Tensor | None) -> tuple[Matrix, Tensor | None]:
    """Kept as tensors."""
    return matrix, bias


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, keep: Keep = as_it_is) -> Weights:
    """All weights in memory of their own, as `dtype` on `device`, matrices of dense layers as `keep` has them; the
    files may go away afterwards.

    Raises CheckpointError.
    """
    config = checkpoint.config
    with ExitStack() as stack:
        files = _Files(checkpoint, dtype, device, stack)
        embedding = files.one("model.embed_tokens.weight")
        head, _ = keep((embedding if config.tied else files.one("lm_head.weight")).t().contiguous(), None)
        if config.embedding_scale != 1.0:
            embedding *= torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        names = layer_names(config.architecture)
        layers = [_layer(files, config, names, number, keep) for number in range(config.n_layers)]
        return Weights(embedding, layers, files.norm("model.norm.weight"), head)


def _layer(files: _Files, config: ModelConfig, names: LayerNames, number: int, keep: Keep) -> LayerWeights:
    prefix = f"model.layers.{number}."
    qkv, qkv_bias = keep(files.matrix(prefix, *names.qkv), files.bias(config.qkv_bias, prefix, *names.qkv))
    out, out_bias = keep(files.matrix(prefix, names.out), files.bias(config.o_bias, prefix, names.out))

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
        mlp=_feed_forward(files, config, names, number, keep),
        mlp_post_norm=norm(names.mlp_post_norm) if config.post_norms else None,
    )


def _head_norms(config: ModelConfig, query: Tensor, key: Tensor) -> Tensor:
    return torch.cat((query.expand(config.n_heads, -1), key.expand(config.n_kv_heads, -1)))


def _feed_forward(files: _Files, config: ModelConfig, names: LayerNames, number: int, keep: Keep) -> Dense | Routed:
    prefix, experts = f"model.layers.{number}.", config.experts
    if experts is None or not experts.layers[number]:
        gate_up, gate_up_bias = keep(
            files.matrix(prefix, *names.gate_up), files.bias(config.mlp_bias, prefix, *names.gate_up)
        )
        down, down_bias = keep(files.matrix(prefix, names.down), files.bias(config.mlp_bias, prefix, names.down))
        return Dense(gate_up, gate_up_bias, down, down_bias)
    router = files.matrix(prefix, names.router)
    gate_up = router.new_empty(experts.count, config.hidden_size, 2 * experts.intermediate_size)
    down = router.new_empty(experts.count, experts.intermediate_size, config.hidden_size)
    for expert in range(experts.count):
        gate_up[expert] = files.matrix(prefix, *[name.format(expert) for name in names.expert_gate_up])
        down[expert] = files.matrix(prefix, names.expert_down.format(expert))
    return Routed(router, gate_up, down, experts.per_token, experts.normalised)
