"""Deadlines, in the order in which they end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Wake = Callable[[float], object]
"""Is told of an end that comes before all others that are known."""


def asleep(end: float) -> None:
    """A Wake for tables whose owner looks at the clock by itself."""


class Deadlines(Generic[Item]):
    """A heap of (time, item). An item that ended early stays in it until its time, so the caller of `due` checks."""

    def __init__(self, wake: Wake = asleep) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._order = itertools.count()
        self._wake = wake

    def add(self, end: float, item: Item) -> None:
        """`item` is due at `end`."""
        earliest = not self._heap or end < self._heap[0][0]
        heapq.heappush(self._heap, (end, next(self._order), item))
        if earliest:
            self._wake(end)

    def first(self) -> float | None:
        """When the next item is due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[Item]:
        """Takes out the items that are due."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
