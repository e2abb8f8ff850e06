"""An adapter's tensors from its file, in the form in which the decoder multiplies by them."""

from __future__ import annotations

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import AdaptedPart, AdapterCheckpoint, CheckpointError
from penstock.engine.kernels.cpu.adapting import StepAdapter, panels_of, whole_ranks
from penstock.engine.layers.adapters import AdapterWeights, ThinProduct


def load_adapter(
    found: AdapterCheckpoint, layers: int, dtype: torch.dtype, device: torch.device, *, kernels: bool
) -> AdapterWeights:
    """Copies the adapter of a model of `layers` layers into new memory, as `dtype` on `device`; with `kernels` in the
    form that step.cpp reads as well. Raises CheckpointError, also when a number is not finite."""
    kept: list[dict[str, list[ThinProduct]]] = [{} for _ in range(layers)]
    try:
        with safe_open(found.file, framework="pt") as file:
            for part in found.parts:
                down, up = (_finite(found, file.get_tensor(info.name), info.name) for info in (part.down, part.up))
                delta = _delta(part, down, up * part.scale, kernels)
                delta = ThinProduct(
                    delta.first, delta.columns, delta.down.to(device, dtype), delta.up.to(device, dtype)
                )
                kept[part.layer].setdefault(part.stack, []).append(delta)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(found.file, str(error)) from None
    weights = tuple({stack: tuple(deltas) for stack, deltas in layer.items()} for layer in kept)
    nbytes = sum(delta.nbytes for layer in weights for deltas in layer.values() for delta in deltas)
    return AdapterWeights(found.fingerprint, weights, nbytes, StepAdapter(weights) if kernels else None)


def _finite(found: AdapterCheckpoint, tensor: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(found.file, f"tensor {name} has numbers that are not finite")
    return tensor.float()


def _delta(part: AdaptedPart, down: Tensor, up: Tensor, kernels: bool) -> ThinProduct:
    up = up.t().contiguous()
    if not kernels:
        return ThinProduct(part.first, part.columns, down, up.unsqueeze(0))
    return ThinProduct(part.first, part.columns, whole_ranks(down, 0), panels_of(whole_ranks(up, 0)))
