"""Whether a device computes routed experts by one product for all of them.

This is written against torch's interface and checked on a CPU, where torch has the same products; it has not run on a
GPU yet.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from penstock.checkpoint import HeldExpert
from penstock.engine.kernels.cuda.capability import ungrouped
from penstock.engine.layers.feedforward import Routed, grouped, held_places, routed
from penstock.engine.layers.weights import Weights

_ROUNDING = 0.1
"""By how much the two ways may differ when they are tried, as a share of the largest result."""
_ROWS = 16
_log = logging.getLogger(__name__)


def group_experts(weights: Weights, activation: str, capability: tuple[int, int]) -> None:
    """Has the experts of `weights` computed by grouped products if a device of this capability has them and they give
    what products of each expert give; `activation` as in `feed_forward`."""
    blocks = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, Routed)]
    if not blocks:
        return
    for block in blocks:
        held = [HeldExpert(number) for number in range(block.rule.count)]
        if block.held is not None and [*block.held] != held:
            block.places = held_places(block.held, block.rule.count).to(block.router.device)
    reason = _reason(blocks[0], activation, capability)
    if reason is not None:
        _log.info("each expert has products of its own, and steps are not captured: %s", reason)
    for block in blocks:
        block.grouped = reason is None
        block.rows = None if block.grouped else block.rows


def _reason(block: Routed, activation: str, capability: tuple[int, int]) -> str | None:
    if not isinstance(block.gate_up, Tensor):
        return "their matrices are not plain"
    dtype, (_, hidden, columns) = str(block.gate_up.dtype).removeprefix("torch."), block.gate_up.shape
    reason = ungrouped(dtype, (hidden, columns // 2), capability)
    return _tried(block, activation) if reason is None else reason


def _tried(block: Routed, activation: str) -> str | None:
    """What is wrong with grouped products of these experts; None when they are right."""
    place, block = block.router.device, replace(block, rows=None)
    x = torch.randn(_ROWS, block.router.shape[0], generator=torch.Generator().manual_seed(3))
    x, positions = x.to(place, block.router.dtype), torch.arange(_ROWS, device=place)
    try:
        found, expected = (way(x, block, activation, positions).float() for way in (grouped, routed))
    except Exception as error:  # a build of torch that lacks the product may raise anything
        return f"{type(error).__name__}: {error}"
    share = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return None if share <= _ROUNDING else f"they are off by {share:.2g} of the largest result"
