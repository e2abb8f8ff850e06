"""A whole update of a network as one CUDA graph: launching its kernels one by one takes longer than computing them.

A graph computes on tensors of fixed sizes in fixed places. So batches are padded to some few sizes, and each size has a
graph of its own; the padding is a document of its own, whose tokens do not count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .data import PackedBatch, Spans
from .optim import Optimizer
from .packed import PackedNet
from .tokenizer import END_OF_TEXT

_TOKENS, _KEPT, _DOCUMENTS = 1024, 2048, 32
"""Batches are padded to a multiple of so many."""
_WARM = 2
"""Updates before one is captured: what is loaded or chosen on first use has to be so by then."""

Sizes = tuple[int, int, int, int]
"""Tokens, positions that count, documents, and the longest document that there is room for."""


def padded(batch: PackedBatch) -> tuple[PackedBatch, Sizes]:
    """`batch` in one of some few sizes, and that size; nothing of the padding counts."""
    tokens, kept = _up(batch.tokens, _TOKENS), _up(len(batch.keep), _KEPT)
    documents = _up(len(batch.spans.bounds), _DOCUMENTS)
    longest = max(_TOKENS, 1 << (batch.spans.longest - 1).bit_length())

    def filled(tensor: Tensor, size: int, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((size - len(tensor),), value)])

    wider = PackedBatch(
        filled(batch.ids, tokens, END_OF_TEXT),
        Spans(filled(batch.spans.bounds, documents + 1, tokens), longest),
        filled(batch.keep, kept, tokens - 1),
        filled(batch.targets, kept, END_OF_TEXT),
        filled(batch.weights, kept, 0),
    )
    return wider, (tokens, kept, documents, longest)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class CapturedUpdate:
    """Updates of a network on a GPU, captured once for each size of batches."""

    def __init__(
        self, model: PackedNet, optimizer: Optimizer, loss: Callable[[PackedNet, PackedBatch], Tensor]
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.device = next(model.net.parameters()).device
        self._rate = torch.zeros((), device=self.device)
        self._graphs: dict[Sizes, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()  # their memory: one runs at a time
        self._result: Tensor | None = None

    def launch(self, batch: PackedBatch, rate: float) -> None:
        """Begin an update from a batch, which lies in the memory of the host, at this learning rate."""
        batch, sizes = padded(batch)
        graph = self._graphs.get(sizes)
        if graph is None:
            graph = self._graphs[sizes] = self._capture(batch.to(self.device))
        for place, tensor in zip(_tensors(graph.batch), _tensors(batch), strict=True):
            place.copy_(tensor.pin_memory(), non_blocking=True)
        self._rate.fill_(rate)
        graph.graph.replay()
        self._result = graph.loss

    def result(self) -> float:
        """The loss of the update that was launched last, when it has been made."""
        assert self._result is not None
        return self._result.item()

    def _update(self, batch: PackedBatch) -> Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.net.parameters(), 1.0)
        self.optimizer.step(self._rate)
        return loss.detach()

    def _capture(self, batch: PackedBatch) -> _Graph:
        """Capture an update. What the updates before it change is put back."""
        with torch.no_grad():
            changed = [*self.model.net.parameters(), *self.optimizer.tensors()]
            before = [tensor.clone() for tensor in changed]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._update(batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            loss = self._update(batch)
        with torch.no_grad():
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
        return _Graph(graph, batch, loss)


class _Graph:
    """A captured update, the tensors that it reads, and its loss."""

    def __init__(self, graph: torch.cuda.CUDAGraph, batch: PackedBatch, loss: Tensor) -> None:
        self.graph = graph
        self.batch = batch
        self.loss = loss


def _tensors(batch: PackedBatch) -> tuple[Tensor, ...]:
    return batch.ids, batch.spans.bounds, batch.keep, batch.targets, batch.weights
