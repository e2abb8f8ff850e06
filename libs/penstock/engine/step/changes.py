"""Which pages have been written outside of steps, for processes that have the pages in memory of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PageChanges:
    """Callable from any thread. A page is noted when all of it is there: what is read of it later is at least that."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, bool]] = deque()

    def written(self, pages: Iterable[int]) -> None:
        """These have other bytes."""
        self._noted.extend((page, True) for page in pages)

    def cleared(self, page: int) -> None:
        """It has zeros."""
        self._noted.append((page, False))

    def take(self) -> tuple[list[int], list[int]]:
        """(pages that have been written, pages of zeros) since the last call."""
        last: dict[int, bool] = {}
        for _ in range(len(self._noted)):
            page, written = self._noted.popleft()
            last[page] = written
        written_pages = [page for page, written in last.items() if written]
        return written_pages, [page for page, written in last.items() if not written]
