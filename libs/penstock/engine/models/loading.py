"""Weights from safetensors files, memory-mapped, cast and stacked the way the decoder wants them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import Checkpoint, CheckpointError
from penstock.engine.models.decoder import LayerWeights, Weights


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
        file = self._checkpoint.tensors[name].file
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor.to(self._device, self._dtype, copy=True)

    def matrix(self, prefix: str, *names: str) -> Tensor:
        """[in, out]: the projections side by side."""
        return torch.cat([self.one(f"{prefix}{name}.weight") for name in names]).t().contiguous()

    def bias(self, present: bool, prefix: str, *names: str) -> Tensor | None:
        return torch.cat([self.one(f"{prefix}{name}.bias") for name in names]) if present else None


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Weights:
    """All weights in memory of their own, as `dtype` on `device`; the files may go away afterwards.

    Raises CheckpointError.
    """
    with ExitStack() as stack:
        files = _Files(checkpoint, dtype, device, stack)
        embedding = files.one("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=[_layer(files, checkpoint, number) for number in range(checkpoint.config.n_layers)],
            norm=files.one("model.norm.weight"),
            head=(embedding if checkpoint.config.tied else files.one("lm_head.weight")).t().contiguous(),
        )


def _layer(files: _Files, checkpoint: Checkpoint, number: int) -> LayerWeights:
    config, prefix = checkpoint.config, f"model.layers.{number}."
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerWeights(
        input_norm=files.one(f"{prefix}input_layernorm.weight"),
        qkv=files.matrix(prefix, *qkv),
        qkv_bias=files.bias(config.qkv_bias, prefix, *qkv),
        qk_norm=_head_norms(files, checkpoint, prefix),
        out=files.matrix(prefix, "self_attn.o_proj"),
        out_bias=files.bias(config.o_bias, prefix, "self_attn.o_proj"),
        mlp_norm=files.one(f"{prefix}post_attention_layernorm.weight"),
        gate_up=files.matrix(prefix, *gate_up),
        gate_up_bias=files.bias(config.mlp_bias, prefix, *gate_up),
        down=files.matrix(prefix, "mlp.down_proj"),
        down_bias=files.bias(config.mlp_bias, prefix, "mlp.down_proj"),
    )


def _head_norms(files: _Files, checkpoint: Checkpoint, prefix: str) -> Tensor | None:
    config = checkpoint.config
    if not config.qk_norm:
        return None
    query = files.one(f"{prefix}self_attn.q_norm.weight").expand(config.n_heads, -1)
    key = files.one(f"{prefix}self_attn.k_norm.weight").expand(config.n_kv_heads, -1)
    return torch.cat((query, key))
