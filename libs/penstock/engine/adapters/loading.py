"""An adapter's tensors from its file, in the form in which the decoder multiplies by them."""

from __future__ import annotations

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import AdaptedPart, AdapterCheckpoint, CheckpointError, TensorCut
from penstock.engine.kernels.cpu.adapting import StepAdapter, panels_of, whole_ranks
from penstock.engine.layers.adapters import AdapterWeights, ThinProduct


def load_adapter(
    found: AdapterCheckpoint, layers: range, dtype: torch.dtype, device: torch.device, *, kernels: bool
) -> AdapterWeights:
    """Copies what an adapter has for these layers into new memory, as `dtype` on `device`; with `kernels` in the form
    that step.cpp reads as well. Raises CheckpointError, also when a number is not finite."""
    kept: list[dict[str, list[ThinProduct]]] = [{} for _ in layers]
    kernels = kernels and not found.by_torch
    both, last = (torch.empty(0), torch.empty(0)), ""
    try:
        with safe_open(found.file, framework="pt") as file:
            for part in found.parts:
                if part.down.name != last:  # else it is of another expert, in the same tensors
                    down, up = (_finite(found, file.get_tensor(info.name), info.name) for info in (part.down, part.up))
                    both, last = (down, up), part.down.name
                down, up = _of_expert(part, *both)
                if part.cut is not None:
                    down, up = _of_rank(part.cut, down, up)
                down, up = _laid_out(down, up * part.scale, kernels)
                thin = ThinProduct(part.first, part.columns, down.to(device, dtype), up.to(device, dtype))
                kept[part.layer - layers.start].setdefault(part.stack, []).append(thin)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(found.file, str(error)) from None
    weights = tuple({stack: tuple(added) for stack, added in layer.items()} for layer in kept)
    nbytes = sum(thin.nbytes for layer in weights for added in layer.values() for thin in added)
    args = StepAdapter(weights) if kernels else None
    return AdapterWeights(found.fingerprint, weights, nbytes, args, found.by_torch)


def _finite(found: AdapterCheckpoint, tensor: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(found.file, f"tensor {name} has numbers that are not finite")
    return tensor.float()


def _of_expert(part: AdaptedPart, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """[rank, inputs] and [columns, rank], of what may be of several experts."""
    if part.together:
        assert part.expert is not None
        down = down.view(part.together, part.rank, -1)[part.expert].clone()
        up = up.view(len(up), part.rank, part.together)[:, :, part.expert]
    return (up.t(), down.t()) if part.turned else (down, up)


def _of_rank(cut: TensorCut, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of lora_B, or the columns of lora_A, that belong to what a rank has of the matrix."""
    if cut.axis == 0:
        return down, torch.cat([up[part.start : part.stop] for part in cut.parts])
    return torch.cat([down[:, part.start : part.stop] for part in cut.parts], 1), up


def _laid_out(down: Tensor, up: Tensor, kernels: bool) -> tuple[Tensor, Tensor]:
    """[rank, inputs] and [columns, rank] as a ThinProduct has them."""
    up = up.t().contiguous()
    return (whole_ranks(down, 0), panels_of(whole_ranks(up, 0))) if kernels else (down, up.unsqueeze(0))
