"""Pages in the hands of sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby

from penstock.engine.hooks import KvSink, PartedSink, PunctualSink
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.stats import Counters
from penstock.engine.step.memory import PageMemory

_SINKS = "sinks"
_log = logging.getLogger(__name__)


class SinkPage:
    """PageRef: one hold on one page."""

    def __init__(self, memory: PageMemory, page: int, sound: bool, give_back: Callable[[int], None]) -> None:
        """`sound`: the page is known to hold finite numbers only."""
        self.page = page
        self.sound = sound
        self._memory = memory
        self._give_back: Callable[[int], None] | None = give_back

    def view(self) -> memoryview:
        """The page's bytes, read-only; do not use them after `release`."""
        assert self._give_back is not None, "the page was released"
        return self._memory.view(self.page)

    def read_into(self, destination: memoryview) -> None:
        """Copies the page's bytes to `destination`, one block long; callable from any thread."""
        assert self._give_back is not None, "the page was released"
        self._memory.read_into(self.page, destination)

    def release(self) -> None:
        """Ends the hold; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.page)


class SinkPages:
    """Holds pages of sequences for sinks, each until the sink releases it."""

    def __init__(self, scheduler: Scheduler, memory: PageMemory, returned: Callable[[], None]) -> None:
        """`returned` is called when a page has come back."""
        self._scheduler = scheduler
        self._memory = memory
        self._returned = returned

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self._memory.block_size

    def hold(self, pages: Sequence[int]) -> list[SinkPage]:
        """One reference for each page; the sink releases each."""
        self._scheduler.hold(_SINKS, pages)
        return [SinkPage(self._memory, page, self._scheduler.shares(page), self._take_back) for page in pages]

    def whole(self, pages: Sequence[int]) -> list[bool]:
        """Of each, whether all of a block is in it."""
        return [not self._scheduler.far(page) for page in pages]

    def _take_back(self, page: int) -> None:
        self._scheduler.release(_SINKS, (page,))
        self._returned()


class SinkFeed:
    """Reports one sequence's blocks to its sink, each once. A sink that raises is logged and counted, no more."""

    def __init__(self, live: Live, sink: KvSink, pages: SinkPages, counters: Counters) -> None:
        self._live = live
        self._sink = sink
        self._pages = pages
        self._counters = counters
        self._reported = 0
        """Leading blocks that the sink knows."""
        live.set_back = self._set_back

    def report(self) -> None:
        """Reports the blocks that became full since the last call, except those that a source loaded. Of those of
        which only the far part is here the sink hears, and gets no page."""
        live = self._live
        first = max(self._reported, live.loaded_blocks)
        whole = live.computed // self._pages.block_size
        if whole <= first:
            return
        self._reported = whole
        for given, run in groupby(self._pages.whole(live.pages[first:whole])):
            blocks = sum(1 for _ in run)
            tell = self._give if given else self._pass
            tell(first, blocks)
            first += blocks

    def finish(self) -> None:
        """The sequence ended normally: reports the rest, and the page that is partly filled."""
        self.report()
        live = self._live
        whole, rest = divmod(live.computed, self._pages.block_size)
        tail = self._pages.hold(live.pages[whole : whole + 1]) if rest else []
        try:
            self._sink.finished(live.computed, tail[0] if tail else None)
        except Exception:
            self._failed(tail)

    def _give(self, first: int, blocks: int) -> None:
        held = self._pages.hold(self._live.pages[first : first + blocks])
        try:
            self._sink.filled(first, held, self._live.tokens)
        except Exception:
            self._failed(held)

    def _pass(self, first: int, blocks: int) -> None:
        if isinstance(self._sink, PartedSink):
            try:
                self._sink.passed(first, blocks, self._live.tokens)
            except Exception:
                self._failed(())

    def _set_back(self) -> None:
        if isinstance(self._sink, PunctualSink):
            try:
                self._sink.set_back()
            except Exception:
                self._failed(())

    def _failed(self, held: Sequence[SinkPage]) -> None:
        self._counters.sink_failures += 1
        _log.warning("the sink of %s failed", self._live.id, exc_info=True)
        for page in held:
            page.release()
