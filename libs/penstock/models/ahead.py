"""Documents drawn by other processes ahead of their turn, for a device that learns faster than one process can draw."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from .data import DocumentStream, Stage, TokenizedDocument

_CHUNK = 64
"""Documents that a process draws at a time."""
_AHEAD = 4
"""Chunks for each process that are under way or wait."""


class SharedStream(DocumentStream):
    """The documents of a DocumentStream, in the same order: drawn ahead by `processes`, which are forked when the
    first document is taken. Documents of a stage that has ended meanwhile are drawn again."""

    def __init__(self, processes: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make = partial(DocumentStream, *args, **kwargs)
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, get_context("fork"), _begin, (make,))
        self._stage: Stage | None = None
        self._ready: deque[TokenizedDocument] = deque()
        self._asked: deque[Future[list[TokenizedDocument]]] = deque()
        self._place = 0  # number of the next document that is ready or asked for
        self._beyond = 0  # of the first one that is not

    def close(self) -> None:
        """End the processes. Nothing can be taken after that."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self, stage: Stage) -> TokenizedDocument:
        if stage is not self._stage or self._place != self.drawn:
            self._restart(stage)
        while len(self._asked) < _AHEAD * self._processes:
            self._asked.append(self._pool.submit(_chunk, self.stages.index(stage), self._beyond))
            self._beyond += _CHUNK
        if not self._ready:
            self._ready.extend(self._asked.popleft().result())
        self._place += 1
        return self._ready.popleft()

    def _restart(self, stage: Stage) -> None:
        for future in self._asked:
            future.cancel()
        self._ready.clear()
        self._asked.clear()
        self._stage = stage
        self._place = self._beyond = self.drawn


_stream: DocumentStream


def _begin(make: partial[DocumentStream]) -> None:
    """In a process that draws: its own stream."""
    global _stream
    _stream = make()


def _chunk(stage: int, first: int) -> list[TokenizedDocument]:
    """In a process that draws: the documents from `first` on, in what is quickly sent and packed."""
    return [_compact(_stream.draw(number, _stream.stages[stage])) for number in range(first, first + _CHUNK)]


def _compact(document: TokenizedDocument) -> TokenizedDocument:
    ids: Sequence[int] = np.asarray(document.ids, np.uint16)  # type: ignore[assignment]
    weights: Sequence[float] = np.asarray(document.weights, np.float32)  # type: ignore[assignment]
    return TokenizedDocument(ids, weights, ())
