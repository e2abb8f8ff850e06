"""KV that sources bring before a sequence is scheduled, while the steps of others go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from penstock.engine.hooks import KvSource, LoadResult
from penstock.engine.loading.writer import LoadWriter
from penstock.engine.scheduling.live import Live
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.stats import Counters
from penstock.engine.step.memory import PageMemory
from penstock.runtime.tasks import being_cancelled

_log = logging.getLogger(__name__)

Loaded = Callable[[Live, int, LoadResult], None]
"""Called when a source is done with a sequence that is still live: leading blocks it wrote, and its result."""


class Loads:
    """Runs one task for each load. After a failed load the engine computes the whole prompt."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: PageMemory,
        *,
        tasks: asyncio.TaskGroup,
        threads: Executor,
        vocab_size: int,
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
        self._counters = counters
        self._loaded = loaded
        self._changed = changed
        self._running: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Loads that have not ended, those of dropped sequences included."""
        return len(self._running)

    def begin(self, live: Live, source: KvSource) -> None:
        """Has `source` fill the sequence's pages; `loaded` is called when it is done, unless the load is cancelled."""
        self._scheduler.load(live)
        load = self._tasks.create_task(self._load(live, source), name=f"load {live.owner}")
        self._running[live.ticket] = load
        load.add_done_callback(lambda _: self._over(live))

    def cancel(self, live: Live) -> None:
        """Ends the sequence's load, if it has one."""
        load = self._running.get(live.ticket)
        if load is not None:
            load.cancel()

    async def _load(self, live: Live, source: KvSource) -> None:
        writer = LoadWriter(self._memory, self._scheduler, live, self._threads)
        try:
            result = await self._ask(live, source, writer)
        finally:
            writer.close()
        await writer.drain()
        del self._running[live.ticket]
        if not live.gone:
            self._loaded(live, writer.written, result)

    def _over(self, live: Live) -> None:
        """Also of a load that was cancelled, perhaps before it began."""
        self._running.pop(live.ticket, None)
        self._changed()

    async def _ask(self, live: Live, source: KvSource, writer: LoadWriter) -> LoadResult:
        """The source's result; an empty one when it raised or its result is impossible."""
        try:
            found = await source.load(writer)
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
