"""One batch while this gateway runs it: its input is looked through, its lines are answered, its results are shown.

A line is done when its result is in the store for good. So it is answered once, but for one that was on its way when
the gateway ended: of that there is no result anywhere, and it is answered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from msgspec.structs import replace

from penstock.gateway.batches.answering import LineAnswerer, LineAnswers
from penstock.gateway.batches.lines import ANY_LENGTH, BatchLine, LineReader, LineResult, expired
from penstock.gateway.batches.looking import InputLook, read_lines
from penstock.gateway.batches.records import BatchStatus, Clock, StoredFile, new_order
from penstock.gateway.batches.results import LineResults
from penstock.gateway.batches.store import BatchClaim, BatchStore, ClaimLost
from penstock.gateway.batches.window import LinePlace, LineWindow
from penstock.gateway.completing.threads import Threads
from penstock.runtime.metrics import GatewayMetrics
from penstock.runtime.tasks import first_of

LOOK_S = 1.0
"""Between two looks whether the batch is to be cancelled, and whether its window has ended."""
_AT_ONCE = 256
"""Lines that are given up together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShop:
    """What all batches of a gateway use together."""

    store: BatchStore
    answers: LineAnswers
    window: LineWindow
    threads: Threads
    metrics: GatewayMetrics
    clock: Clock
    most_lines: int
    """Of a batch."""
    most_bytes: int
    """Of the body of a line."""
    kept_s: float
    """For which results are kept."""
    look_s: float = LOOK_S


class BatchRun:
    """A batch that is claimed. Call `work` once; it may be cancelled at any time, and the batch goes on elsewhere."""

    def __init__(self, shop: BatchShop, claim: BatchClaim) -> None:
        self._shop = shop
        self._results = LineResults(shop.store, claim, shop.metrics)
        self._waiting = 0
        self._log = structlog.get_logger("penstock.gateway").bind(batch=claim.batch.id, tenant=claim.batch.tenant)

    async def work(self) -> None:
        """Brings the batch to its end. Raises ClaimLost and OSError: then another claim goes on with it."""
        status = self._results.batch.status
        self._log.info("a batch is taken up", status=status)
        try:
            if status == "validating":
                status = await self._look()
            await self._results.recall()
            if status == "in_progress":
                status = await self._progress()
            await self._end(status)
        finally:
            self._wait_for(0)
        batch = self._results.batch
        self._log.info("a batch is over", status=batch.status, completed=batch.completed, failed=batch.failed)

    async def _look(self) -> BatchStatus:
        """Looks through the input; what the batch is then."""
        shop, batch = self._shop, self._results.batch
        look = InputLook(batch, shop.answers, most_lines=shop.most_lines, most_bytes=shop.most_bytes)
        looking = look.through(shop.store, shop.threads)
        seen, cancelled, _ = await first_of(looking, self._cancelled(), self._late())
        if not seen:
            return "cancelled" if cancelled else "expired"
        if look.faults:
            await self._save(faults=tuple(look.faults))
            return "failed"
        await self._save(status="in_progress", in_progress_at=self._now, total=look.total, model=look.model)
        return "in_progress"

    async def _progress(self) -> BatchStatus:
        """Answers lines until all have results, or the batch is over; what it is then."""
        batch = self._results.batch
        self._wait_for(batch.total - batch.completed - batch.failed)
        try:
            async with asyncio.TaskGroup() as tasks:  # the results are written to their end, however the lines end
                tasks.create_task(self._results.write())
                done, cancelled, _ = await first_of(self._answer_all(), self._cancelled(), self._late())
                self._results.close()
        except ExceptionGroup as group:
            raise _first(group) from None
        if done:
            return "completed"
        if cancelled:
            return "cancelled"
        await self._give_up()
        return "expired"

    async def _answer_all(self) -> bool:
        shop = self._shop
        answerer = LineAnswerer(self._results.batch, shop.answers, shop.window, shop.clock)
        async with asyncio.TaskGroup() as tasks, aclosing(self._left()) as lines:
            async for line in lines:
                place = await answerer.place(line)
                answering = tasks.create_task(self._answer(answerer, line, place))
                answering.add_done_callback(partial(_leave, place))  # one that never began has not left
        return True

    async def _answer(self, answerer: LineAnswerer, line: BatchLine, place: LinePlace) -> None:
        self._wait_for(self._waiting - 1)
        with self._shop.metrics.batch_running.track_inprogress():
            result = await answerer.answer(line, place)
        await self._results.keep(result)

    async def _left(self) -> AsyncGenerator[BatchLine, None]:
        """The lines that have no result, in order."""
        batch, shop = self._results.batch, self._shop
        reader = LineReader(batch.endpoint, lambda model: None)  # a model that has gone since is an error of its lines
        async with aclosing(read_lines(batch, reader, shop.store, shop.threads, most_bytes=ANY_LENGTH)) as pages:
            async for lines in pages:
                for line in lines:
                    if isinstance(line, BatchLine) and line.custom_id not in self._results.done:
                        yield line

    async def _give_up(self) -> None:
        """The lines that have no result have an error instead."""
        given_up: list[LineResult] = []
        async with aclosing(self._left()) as lines:
            async for line in lines:
                given_up.append(expired(self._results.batch, line))
                if len(given_up) == _AT_ONCE:
                    await self._results.add(given_up)
                    given_up = []
        await self._results.add(given_up)

    async def _cancelled(self) -> bool:
        """Returns when the batch is to be cancelled."""
        batch = self._results.batch
        while True:
            found = None
            with suppress(OSError):  # as long as the claim holds, lines that are on their way are not given up
                found = await self._shop.store.batch(batch.tenant, batch.id)
            if found is not None and found.status == "cancelling":
                self._results.batch = replace(self._results.batch, cancelling_at=found.cancelling_at)
                return True
            await asyncio.sleep(self._shop.look_s)

    async def _late(self) -> bool:
        """Returns when the batch's window has ended. The clock is looked at now and then: it may be set."""
        while True:
            if (left_s := self._results.batch.expires_at - self._shop.clock()) <= 0:
                return True
            await asyncio.sleep(min(self._shop.look_s, left_s))

    async def _end(self, status: BatchStatus) -> None:
        """Shows the results; a batch that is found in between is ended by the same way."""
        batch = self._results.batch
        if status == "finalizing":
            status = "expired" if batch.expired_at else "completed"
        elif status in ("completed", "expired"):
            more: dict[str, Any] = {"expired_at": self._now} if status == "expired" else {}
            await self._save(status="finalizing", finalizing_at=self._now, **more)
        elif status == "cancelling":
            status = "cancelled"
        ids = {"output_file_id": await self._show(True), "error_file_id": await self._show(False)}
        await self._save(status=status, **{f"{status}_at": self._now}, **ids)

    async def _show(self, ok: bool) -> str | None:
        """Shows the file of the answers, or that of the errors; None where it would be empty."""
        batch, now = self._results.batch, self._now
        if not self._results.sizes[ok]:
            return None
        file = StoredFile(
            id=batch.results(ok),
            tenant=batch.tenant,
            name=f"{batch.id}_{'output' if ok else 'error'}.jsonl",
            purpose="batch_output",
            bytes=self._results.sizes[ok],
            created_at=now,
            expires_at=now + min(int(self._shop.kept_s), batch.results_kept_s or int(self._shop.kept_s)),
            order=new_order(),
        )
        await self._shop.store.add_file(file)
        return file.id

    async def _save(self, **changes: Any) -> None:
        await self._results.save(replace(self._results.batch, **changes))

    @property
    def _now(self) -> int:
        return int(self._shop.clock())

    def _wait_for(self, lines: int) -> None:
        """So many lines have not begun."""
        self._shop.metrics.batch_waiting.inc(lines - self._waiting)
        self._waiting = lines


def _leave(place: LinePlace, _ended: asyncio.Task[None]) -> None:
    place.leave()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The claim that was lost, or what the store could not do, before anything that followed from it."""
    found: Exception = group.subgroup((ClaimLost, OSError)) or group
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found
