"""KV that sources bring before a sequence is scheduled, while the steps of others go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from penstock.engine.hooks import KvSource, LoadResult, PageWriter, PatientSource
from penstock.engine.loading.fetches import Fetches
from penstock.engine.loading.writer import LoadWriter
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.stats import Counters
from penstock.engine.step.memory import PageMemory
from penstock.runtime.tasks import being_cancelled

_log = logging.getLogger(__name__)

Loaded = Callable[[Live, int, LoadResult], None]
"""Called when a source is done with a sequence that is still live: leading blocks it wrote, and its result."""


_Load = Callable[[PageWriter], Awaitable[int | LoadResult]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A source that has answered, and may have more later."""

    source: PatientSource
    at: float
    """When it answered, in seconds of the monotonic clock."""
    took: float
    """Seconds until it did."""


class Loads:
    """Runs one task for each load. After a failed load the engine computes the whole prompt.

    Other workers store blocks while a sequence waits. So its source is asked once more before the sequence begins, when
    it has waited for `again_s` and asking is predicted to take less than computing the rest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: PageMemory,
        *,
        tasks: asyncio.TaskGroup,
        threads: Executor,
        vocab_size: int,
        again_s: float,
        counters: Counters,
        loaded: Loaded,
        changed: Callable[[], None],
    ) -> None:
        """`threads` copy large blocks; `changed` is called when a load has ended."""
        self._scheduler = scheduler
        self._memory = memory
        self._tasks = tasks
        self._threads = threads
        self._vocab_size = vocab_size
        self._again_s = again_s
        self._counters = counters
        self._loaded = loaded
        self._changed = changed
        self._fetches = Fetches()
        self._asked: dict[int, _Asked] = {}
        """By ticket of the sequence, until it is asked again or dropped."""
        self._running: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Loads that have not ended, those of dropped sequences included."""
        return len(self._running)

    def begin(self, live: Live, source: KvSource) -> None:
        """Has `source` fill the sequence's pages; `loaded` is called when it is done, unless the load is cancelled."""
        self._scheduler.load(live)
        self._start(live, source, source.load)

    def look_again(self, lives: Sequence[Live]) -> None:
        """Asks the sources of sequences that are about to begin for more, where that is worth it. They keep their place
        in the line, and others may begin meanwhile."""
        now = time.monotonic()
        for live in lives:
            asked = self._asked.get(live.ticket)
            if asked is not None and self._worth_it(live, asked, now):
                del self._asked[live.ticket]
                self._scheduler.load_again(live)
                self._start(live, asked.source, asked.source.load_more)

    def _worth_it(self, live: Live, asked: _Asked, now: float) -> bool:
        rate = self._counters.prefill_tokens_per_s
        unused = not (live.stripped or live.preemptions)
        return unused and now - asked.at > self._again_s and live.remaining > asked.took * rate > 0

    def _start(self, live: Live, source: KvSource, load: _Load) -> None:
        task = self._tasks.create_task(self._load(live, source, load), name=f"load {live.owner}")
        self._running[live.ticket] = task
        task.add_done_callback(lambda task: self._over(live, task))

    def cancel(self, live: Live) -> None:
        """Ends the sequence's load, if it has one."""
        self._asked.pop(live.ticket, None)
        load = self._running.get(live.ticket)
        if load is not None:
            load.cancel()

    async def _load(self, live: Live, source: KvSource, load: _Load) -> None:
        began = time.monotonic()
        writer = LoadWriter(self._memory, self._scheduler, live, self._threads, self._fetches)
        try:
            result = await self._ask(live, load, writer)
        finally:
            writer.close()
        await writer.drain()
        del self._running[live.ticket]
        if not live.gone:
            if isinstance(source, PatientSource) and load == source.load and live.chain is not None:
                now = time.monotonic()
                self._asked[live.ticket] = _Asked(source, now, max(0.0, now - began - result.waited_s))
            self._loaded(live, writer.written, result)

    def _over(self, live: Live, task: asyncio.Task[None]) -> None:
        """Also of a load that was cancelled, perhaps before it began."""
        if self._running.get(live.ticket) is task:
            del self._running[live.ticket]
        self._changed()

    async def _ask(self, live: Live, load: _Load, writer: LoadWriter) -> LoadResult:
        """The source's result; an empty one when it raised or its result is impossible."""
        try:
            found = await load(writer)
            result = LoadResult(found, (), found) if isinstance(found, int) else found
            self._check(live, result)
            return result
        except (Exception, asyncio.CancelledError):
            if being_cancelled():
                raise
            self._counters.load_failures += 1
            _log.warning("loading KV of %s failed; computing it", live.id, exc_info=True)
            return LoadResult(0)

    def _check(self, live: Live, result: LoadResult) -> None:
        if min(result.valid_tokens, result.cached_tokens) < 0:
            raise ValueError(f"negative counts: {result}")
        for index, token in enumerate(result.output, start=live.generated):
            if token.index != index or not 0 <= token.token < self._vocab_size:
                raise ValueError(f"token {token} cannot follow {index} generated tokens")
