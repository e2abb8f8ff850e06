"""Chooses the backend of paged attention for a device: the first that is installed and proves itself there.

The order is torch's varlen attention, flashinfer, Triton. To prove itself, a backend solves a small problem with the
model's own heads over pages that are out of order, some of them shared, and the result is compared with gathering. A
backend that raises or is wrong is passed over, and the reason is logged. When none is left, torch gathers, as on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.checkpoint import ModelConfig
from penstock.engine.kernels.cuda import over_flashinfer, varlen
from penstock.engine.kernels.cuda.paged import GatherPaged, Heads, PagedAttention, host_paged, on_device
from penstock.engine.step.memory import PageMemory

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionCandidate:
    """A backend that may be chosen."""

    name: str
    missing: str | None
    """Why it can't be tried; None when it can."""
    make: Callable[[], PagedAttention]
    undo: Callable[[], None] = lambda: None
    """Undoes what `make` changed in the process; called when the candidate is not chosen."""


def candidates(heads: Heads, memory: PageMemory, capability: tuple[int, int]) -> list[AttentionCandidate]:
    """All candidates, in the order of preference."""
    dtype = memory.data.dtype

    def over_triton() -> PagedAttention:
        from penstock.engine.kernels.cuda.triton_paged import TritonPaged

        return TritonPaged(heads, memory)

    return [
        AttentionCandidate(
            "varlen",
            varlen.missing(heads, dtype, capability),
            lambda: varlen.VarlenPaged(heads, memory, varlen.activate(capability)),
            varlen.deactivate,
        ),
        AttentionCandidate(
            "flashinfer",
            over_flashinfer.missing(heads, dtype, capability),
            lambda: over_flashinfer.FlashInferPaged(heads, memory, importlib.import_module("flashinfer")),
        ),
        AttentionCandidate("triton", _without_triton(capability), over_triton),
    ]


def _without_triton(capability: tuple[int, int]) -> str | None:
    if capability < (7, 5):
        return f"it needs compute capability 7.5, this device has {capability[0]}.{capability[1]}"
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def choose(config: ModelConfig, memory: PageMemory, found: Sequence[AttentionCandidate]) -> PagedAttention | None:
    """The first of `found` that works; None when torch has to gather. Logs which candidates were passed over, and
    why."""
    for candidate in found:
        reason = candidate.missing
        if reason is None:
            try:
                backend = candidate.make()
                reason = disproof(backend, config, memory)
            except Exception as error:  # a library that happens to be installed may fail in any way
                reason = f"{type(error).__name__}: {error}"
            else:
                if reason is None:
                    _log.info("paged attention through %s", candidate.name)
                    return backend
            candidate.undo()
        _log.info("no paged attention through %s: %s", candidate.name, reason)
    _log.warning("no paged attention on this device: pages are gathered")
    return None


def disproof(backend: PagedAttention, config: ModelConfig, memory: PageMemory) -> str | None:
    """What is wrong with the backend's answers; None when they are right. The pages are zero before and afterwards."""
    size = memory.block_size
    longest = min(40, memory.data.shape[0] - 9) * size
    ends = [1, 3 * size + 1, longest, longest]
    if longest <= 3 * size:
        return None  # too few pages to prove anything
    pages = torch.randperm(memory.data.shape[0] - 1, generator=torch.Generator().manual_seed(1)).add_(1).tolist()
    tables, used = [], 0
    for end in ends[:3]:
        tables.append(pages[used : used + -(-end // size)])
        used += -(-end // size)
    tables.append([*tables[2][:-1], pages[used]])
    used += 1
    own = Heads.of(config)
    generator = torch.Generator(memory.data.device).manual_seed(2)
    shape = (used, 2, size, own.kv_heads, own.dim)
    first = memory.first_layer
    layers = {own.windows[layer]: layer for layer in range(first, first + memory.n_layers)}
    worst = 0.0
    try:
        for window, layer in layers.items():
            content = torch.randn(shape, generator=generator, device=memory.data.device)
            there = torch.tensor(pages[:used], device=memory.data.device)
            memory.data[there, layer - first] = content.to(memory.data.dtype)
            for rows in ([1, 1, 1, 1], [1, 3, 2, 2]):
                host = host_paged(ends, rows, tables, max(map(len, tables)))
                paged = on_device(host, memory.data.device)
                query = torch.randn(paged.rows, own.heads, own.dim, generator=generator, device=memory.data.device)
                query = query.to(memory.data.dtype)
                answer = backend.begin(paged, host, False)(layer, query).float()
                right = GatherPaged(own, memory).begin(paged, host, False)(layer, query).float()
                worst = max(worst, float((answer - right).abs().max()))
                if not worst <= _TOLERANCE[memory.data.dtype]:
                    return f"it is off by {worst:.2g} in a layer with window {window}"
    finally:
        memory.data[torch.tensor(pages[:used], device=memory.data.device)] = 0
    return None
