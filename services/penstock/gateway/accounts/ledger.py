"""Who has used what: each ended request is added, written within moments, and never lost while the book can be written.

The counts are those of the workers, as the response's usage has them, so their sums are the sums of the workers'
counters (docs/design/accounting.md).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain

import structlog

from penstock.errors import Unavailable
from penstock.gateway.accounts.books import Book, LedgerBatch, open_book
from penstock.gateway.accounts.entry import HOUR_S, NANO, Counts, Entries, LedgerLine, merged
from penstock.gateway.accounts.terms import Terms
from penstock.gateway.request.work import TIERS
from penstock.runtime.tasks import Failed, beside

_RETRY_S = 1.0
_LEARN_S = 2.0
"""Most that a gateway waits, before it serves, for what was spent before it."""
_DAY_S = 24 * HOUR_S


class UsageLedger:
    """Adds requests to a book. Made by `open_ledger`."""

    def __init__(self, book: Book, terms: Terms, clock: Callable[[], float] = time.time) -> None:
        self.terms = terms
        self.book = book
        self._clock = clock
        self._waiting: dict[LedgerLine, Counts] = {}
        self._writing: Entries = {}
        self._batch = LedgerBatch(secrets.token_hex(16), 0)
        """What is being written, or was last."""
        self._closed = False
        self._changed = asyncio.Event()
        self._written = asyncio.Condition()
        self._spent: dict[str, tuple[int, int]] = {}
        """By tenant: the day and what was spent on it, in billionths."""
        self._log = structlog.get_logger("penstock.gateway")

    def add(self, tenant: str, model: str, counts: Counts) -> None:
        """Adds an ended request, also one that failed: what was computed was used. Sets its cost by the terms."""
        cached = {tier: getattr(counts, f"cached_{tier}") for tier in TIERS}
        cost = self.terms.price(model).cost(counts.computed_tokens, cached, counts.output_tokens)
        counts.cost_nano = round(cost * NANO)
        now = int(self._clock())
        account = LedgerLine(now - now % HOUR_S, tenant, model)
        self._waiting.setdefault(account, Counts()).add(counts)
        day, spent = self._today(tenant)
        self._spent[tenant] = (day, spent + counts.cost_nano)
        self._changed.set()

    def spent_today(self, tenant: str) -> float:
        """What the tenant's requests have cost since midnight, UTC: all of this gateway, and of others that write into
        the same book what `learn_spent` has found."""
        return self._today(tenant)[1] / NANO

    @property
    def waits(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._writing or self._waiting)

    async def read(self, since: int, until: int, tenant: str | None) -> Entries:
        """The entries of hours that begin in [since, until), with what is still to be written. Raises Unavailable.

        Only the hours that may be written meanwhile are read while nothing is written: they are few.
        """
        open_from = min(max(since, self._open_from()), until)
        try:
            found = await self.book.read(since, open_from, tenant)
            async with self._written:
                found.update(await self.book.read(open_from, until, tenant))
                waiting = merged(self._writing.items(), self._waiting.items())
        except OSError as error:
            self._log.error("the ledger can't be read", reason=str(error))
            raise Unavailable("the ledger can't be read now", retry_after=_RETRY_S) from None
        for line, counts in waiting.items():
            if since <= line.hour < until and tenant in (None, line.tenant):
                found |= merged([(line, found.get(line, Counts())), (line, counts)])
        return found

    def _open_from(self) -> int:
        """The first hour that anything of ours may still be added to."""
        now = int(self._clock())
        return min([now - now % HOUR_S, *(line.hour for line in chain(self._writing, self._waiting))])

    async def learn_today(self) -> None:
        """Reads what was spent today before this process began. Raises OSError."""
        today = self._day()
        for account, counts in (await self.book.read(today, today + _DAY_S, None)).items():
            self._spent[account.tenant] = (today, self._today(account.tenant)[1] + counts.cost_nano)

    async def learn_spent(self, tenants: Sequence[str]) -> None:
        """Reads what all have spent today, others' gateways too. Raises OSError."""
        if not tenants:
            return
        async with self._written:  # nothing of ours is on its way meanwhile
            if self._writing:
                return  # it failed, and may be there all the same: nobody knows how often it would count
            today = self._day()
            for tenant, written in zip(tenants, await self.book.spent(today, tenants), strict=True):
                waiting = chain(self._writing.items(), self._waiting.items())
                ours = sum(counts.cost_nano for line, counts in waiting if line.tenant == tenant and line.hour >= today)
                # A book of an earlier version does not know the whole day; nothing is ever unspent.
                self._spent[tenant] = (today, max(self._today(tenant)[1], written + ours))

    async def write(self) -> None:
        """Writes whatever comes, until `close`; what can't be written waits, also for another start of this task."""
        if self.waits:
            self._changed.set()
        while not self._closed:
            await self._changed.wait()
            self._changed.clear()
            if not await self.flush() and not self._closed:
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    def close(self) -> None:
        """Lets `write` come to its end. It is not cancelled: nobody would know whether its last batch was written."""
        self._closed = True
        self._changed.set()

    async def flush(self) -> bool:
        """Writes what waits; returns whether that worked. A batch that failed is written again as it was, by its
        number, so that it counts once though the book may have it."""
        async with self._written:
            if not self._writing:
                self._writing, self._waiting = self._waiting, {}
                self._batch = self._batch._replace(number=self._batch.number + 1)
            if self._writing:
                try:
                    await self.book.add(self._writing, self._batch)
                except OSError as error:
                    self._log.error("the ledger can't be written; it is tried again", reason=str(error))
                    return False
                self._writing = {}
                if self._waiting:
                    self._changed.set()
        return True

    def _today(self, tenant: str) -> tuple[int, int]:
        day, spent = self._spent.get(tenant, (0, 0))
        today = self._day()
        return (today, spent if day == today else 0)

    def _day(self) -> int:
        now = int(self._clock())
        return now - now % _DAY_S


async def _learn_first(ledger: UsageLedger) -> None:
    """Before anybody is served: `learn_spent` finds the same later, of those who ask."""
    try:
        async with asyncio.timeout(_LEARN_S):
            await ledger.learn_today()
    except OSError as error:  # a TimeoutError is one
        log = structlog.get_logger("penstock.gateway")
        log.warning("the ledger does not say yet what was spent today", reason=str(error))


@asynccontextmanager
async def open_ledger(where: str, terms: Terms, failed: Failed) -> AsyncIterator[UsageLedger]:
    """A ledger in the book at `where` (see `open_book`) for the length of the block. Raises ConfigError."""
    async with open_book(where) as book:
        ledger = UsageLedger(book, terms)
        await _learn_first(ledger)
        async with beside(ledger.write, name="ledger", on_failure="restart", failed=failed) as writing:
            try:
                yield ledger
            finally:
                ledger.close()
                await writing.ended()
        while ledger.waits and await ledger.flush():
            pass
