"""What routers share, in Redis: written behind and read beside the planning, which never waits for it.

One task takes what has changed and sends it, with all that it reads, in one round trip: not more often than every
`_PAUSE_S`. After any failure nothing is resumed: the router begins a new epoch with all of its bookings, and reads
everything of the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from penstock.router.shared.commons import Changes, Commons
from penstock.router.shared.following import OwnerReader
from penstock.router.shared.records import (
    BeliefFact,
    BookingFact,
    ForeignState,
    FreedFact,
    HomeFact,
    Record,
    pack,
    pack_record,
    unpack_record,
)
from penstock.router.shared.scripts import NOTE, OWNERS, PUT, ROOT, TAKE, WRITE, owner_keys, recent_key
from penstock.runtime.metrics import RouterMetrics
from penstock.runtime.redis_client import asked, in_step

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PAUSE_S = 0.05
"""Least between two round trips."""
_IDLE_S = 0.25
"""Most between them."""
_LIST_S = 1.0
"""Between two looks at who there is."""
_LOAD_S = 2.0
"""Least between two readings of all records."""
_PATIENCE_S = 5.0
"""For one round trip, however many commands it has."""
_BATCH = 256
"""Changes of each kind in one round trip."""
_KEPT_MS = 3_600_000
"""For which an owner's epoch and log outlive it."""
_FAR_MS = 3_600_000
"""A record that was made so much later than now was not made then."""
_PAGE = 500
_MOST_OVER = 1000
"""Records of a kind that are too many which one round trip deletes."""
_KINDS = ("home", "lengths", "member")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTerms:
    """How a router shares."""

    owner: str
    """Its name among the routers of one Redis."""
    lease_s: float
    """Its bookings are over when it has not been heard of for so long."""
    record_s: float
    """For which sessions, lengths and beliefs are kept."""
    most_records: int
    """That are kept, and read, of each kind."""


class LeaseLost(OSError):
    """What this router wrote was refused: its lease had expired, or another router has its name."""


class RedisState:
    """One router's share. Run `keep` beside the router."""

    def __init__(
        self,
        client: Redis,
        commons: Commons,
        terms: RedisTerms,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        commons.carried = True
        self._client = client
        self._commons = commons
        self._terms = terms
        self._metrics = metrics
        self._clock = clock
        self._log = structlog.get_logger("penstock.router")
        self._lease_ms = int(terms.lease_s * 1000)
        self._epoch = 0
        """0: it has to take one."""
        self._last_epoch = 0
        self._number = 0
        """Of the last entry of its log in this epoch."""
        self._written_at = self._listed_at = self._loaded_at = -1e9
        self._others: dict[str, OwnerReader] = {}
        self._load_needed = True
        self._over: list[str] = []
        """Keys of records that are too many, which the next round trip deletes."""
        self.in_step_at = clock()
        """When a round trip last succeeded."""
        self._behind = False
        self._first = asyncio.Event()

    async def first(self, patience_s: float) -> None:
        """Returns after the first round trip, or so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._first.wait()

    async def keep(self) -> None:
        """Never returns; cancel it, then call `leave`."""
        stirred = self._commons.stirred
        await in_step(self._round, self._fail, stirred, pause_s=_PAUSE_S, idle_s=_IDLE_S)

    async def leave(self) -> None:
        """Gives the lease back, so that nobody waits for its end; tries once, and not for long."""
        if self._epoch:
            _, lease, bookings, _ = owner_keys(self._terms.owner)
            with suppress(OSError):
                async with asyncio.timeout(1.0):
                    await asked(self._client.delete(lease, bookings))

    def seconds_behind(self) -> float:
        """Since the last round trip that succeeded."""
        return max(0.0, self._clock() - self.in_step_at)

    async def _round(self) -> None:
        if self._load_needed and self._clock() - self._loaded_at > _LOAD_S:
            await self._load()
            self._load_needed, self._loaded_at = False, self._clock()
        if not self._epoch:
            async with asyncio.timeout(_PATIENCE_S):
                await self._take()
        changes = self._commons.take(_BATCH)  # after this more may come at once, and there may be more already
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._exchange(changes)
        except BaseException:
            self._commons.restore(changes)
            raise
        self.in_step_at = self._clock()
        self._first.set()
        self._commons.others.routers = 1 + sum(one.lives for one in self._others.values())
        if self._behind:
            self._behind = False
            self._log.info("the shared state answers again")
        self._metrics.state_behind.set(0)

    def _fail(self, error: OSError) -> None:
        self._epoch, self._load_needed = 0, True
        self._commons.unbooked()
        for follower in self._others.values():
            follower.lost()
        behind = self.seconds_behind()
        self._metrics.state_behind.set(behind)
        self._metrics.state_failures.inc()
        if not self._behind and not isinstance(error, LeaseLost):
            self._behind = True
            self._log.warning("the shared state does not answer; routing goes on without it", reason=str(error))
        if behind > self._terms.lease_s:
            self._commons.others.routers = 0
            for owner in self._others:
                self._commons.forget(owner)

    async def _take(self) -> None:
        """A new epoch, which begins with all bookings."""
        bookings: list[object] = []
        for booking in self._commons.bookings():
            bookings += (booking.number, pack(booking))
        keys = owner_keys(self._terms.owner)
        epoch, replaced = await self._eval(TAKE, keys, (self._lease_ms, _KEPT_MS, *bookings))
        for what in replaced:
            self._refuse(what.decode(errors="replace"))
        if epoch <= self._last_epoch:
            self._log.warning("the shared state has lost what it had; it is written anew")
            self._commons.everything()
        self._epoch = self._last_epoch = epoch
        self._number = 0
        self._written_at = self._clock()

    async def _exchange(self, changes: Changes) -> None:
        """One round trip: writes the changes, and reads what the others have written."""
        now = self._clock()
        pipe = self._client.pipeline(transaction=False)
        wrote = self._write(pipe, changes, now)
        for record, at in changes.records:
            self._put(pipe, record, at)
        noted = self._note(pipe, [record for record, _ in changes.records])
        over, self._over = self._over, []
        for key in over:
            pipe.delete(key)
        listed = now - self._listed_at > _LIST_S
        if listed:
            wall = int(time.time() * 1000)
            pipe.zadd(OWNERS, {self._terms.owner: wall})
            pipe.zremrangebyscore(OWNERS, "-inf", wall - _KEPT_MS)
            pipe.zrange(OWNERS, 0, -1)
        followed = [(owner, one) for owner, one in self._others.items()]
        for _, one in followed:
            one.ask(pipe)
        answers = iter(await asked(pipe.execute(raise_on_error=False)) if len(pipe) else [])
        if wrote:
            self._wrote(next(answers), now)
        for _ in changes.records:
            _check(next(answers))
        for kind in noted:
            _check(names := next(answers))
            self._over += (_record_key(kind, name.decode(errors="replace")) for name in names)
        for _ in over:
            _check(next(answers))
        if listed:
            await self._list([next(answers) for _ in range(3)], now)
        for _, one in followed:
            if await one.answered(next(answers), next(answers)):
                self._load_needed = True

    def _write(self, pipe: Any, changes: Changes, now: float) -> bool:
        """Whether there is something to write: changes, or the lease."""
        if not changes.facts and now - self._written_at < self._terms.lease_s / 4:
            return False
        placed: list[object] = []
        over: list[object] = []
        for fact in changes.facts:
            if isinstance(fact, BookingFact):
                placed += (fact.number, pack(fact))
            elif isinstance(fact, FreedFact):
                over.append(fact.number)
        number, entry = (self._number + 1, pack(changes.facts)) if changes.facts else (0, b"")
        _, *keys = owner_keys(self._terms.owner)
        times = self._lease_ms, _KEPT_MS
        pipe.eval(WRITE, 3, *keys, self._epoch, *times, number, entry, len(placed) // 2, *placed, *over)
        self._number = number or self._number
        return True

    def _wrote(self, answer: object, now: float) -> None:
        if answer != 1:
            _check(answer)
            self._log.warning("the lease of this router's bookings is lost; it takes a new one")
            self._metrics.state_lost.inc()
            raise LeaseLost
        self._written_at = now

    def _put(self, pipe: Any, record: Record, at: float) -> None:
        wall = time.time()
        stamp = int((wall - (self._clock() - at)) * 1000)
        value = pack_record(record, max(0, stamp))
        kept_ms = int(self._terms.record_s * 1000)
        pipe.eval(PUT, 1, record_key(record), value, kept_ms, f"{int(wall * 1000) + _FAR_MS:013d}")

    def _note(self, pipe: Any, records: Sequence[Record]) -> list[str]:
        """Has the written records counted, and learns which are too many. Returns their kinds."""
        names: dict[str, list[str]] = {}
        for record in records:
            kind, name = _named(record)
            names.setdefault(kind, []).append(name)
        terms, wall = self._terms, int(time.time() * 1000)
        limits = int(terms.record_s * 1000), terms.most_records, _MOST_OVER
        for kind, written in names.items():
            pipe.eval(NOTE, 1, recent_key(kind), wall, *limits, *written)
        return list(names)

    async def _list(self, answers: Sequence[object], now: float) -> None:
        """Who there is; follows those that are new."""
        found = answers[2]
        if not isinstance(found, list):
            self._refuse(f"{OWNERS}: {answers[0]}")
            await asked(self._client.delete(OWNERS))
            return
        self._listed_at = now
        names = {name.decode(errors="replace") for name in found} - {self._terms.owner}
        for owner in self._others.keys() - names:
            self._commons.forget(owner)
            del self._others[owner]
        for owner in names - self._others.keys():
            follower = self._others[owner] = OwnerReader(owner, self._commons, self._eval, self._refuse)
            await follower.begin()

    async def _load(self) -> None:
        """Reads what is known of sessions, answers and workers, by name: others may have any number of keys in the same
        database. Nobody waits for it but this task."""
        wall, now = time.time(), self._clock()
        for kind in _KINDS:
            names = await self._recent(kind)
            for start in range(0, len(names), _PAGE):
                page = [_record_key(kind, name) for name in names[start : start + _PAGE]]
                await self._load_page(page, wall, now)

    async def _recent(self, kind: str) -> list[str]:
        """The names of the records of a kind that were written last."""
        pipe = self._client.pipeline(transaction=False)
        pipe.zrevrange(recent_key(kind), 0, self._terms.most_records - 1)
        [names] = await asked(pipe.execute(raise_on_error=False))
        if isinstance(names, list):
            return [name.decode(errors="replace") for name in names]
        if not str(names).startswith("WRONGTYPE"):
            raise OSError(str(names))
        self._refuse(f"{recent_key(kind)}: {names}")
        await asked(self._client.delete(recent_key(kind)))
        return []

    async def _load_page(self, page: Sequence[str], wall: float, now: float) -> None:
        pipe = self._client.pipeline(transaction=False)
        for key in page:
            pipe.get(key)
        for key, value in zip(page, await asked(pipe.execute(raise_on_error=False)), strict=True):
            if value is None:  # it has expired since
                continue
            try:
                record, stamp = unpack_record(value)
                if record_key(record) != key:
                    raise ForeignState("under another's key")
            except ForeignState as error:
                self._refuse(f"{key}: {error}")
                continue
            self._commons.load(record, now - max(0.0, wall - stamp / 1000))

    async def _eval(self, script: str, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Any:
        return await asked(_eval(self._client, script, keys, arguments))

    def _refuse(self, what: str) -> None:
        """Something there is not ours: it is named, and what is known here is written in its place in time."""
        self._metrics.state_refused.inc()
        self._log.error("shared state refused", what=what)


def _eval(client: Redis, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Awaitable[Any]:
    return client.eval(script, len(keys), *keys, *arguments)


def record_key(record: Record) -> str:
    """The key of a record."""
    return _record_key(*_named(record))


def _record_key(kind: str, name: str) -> str:
    return f"{ROOT}:{kind}:{{{name}}}"


def _named(record: Record) -> tuple[str, str]:
    """Kind and name of a record: a digest, since the names in it may have any characters."""
    names: tuple[str, ...]
    match record:
        case HomeFact():
            kind, names = "home", (record.model, record.session)
        case BeliefFact():
            kind, names = "member", (record.member,)
        case _:
            kind, names = "lengths", record.names
    text = "".join(f"{len(name)}:{name}" for name in names)
    return kind, hashlib.sha256(text.encode()).hexdigest()[:40]


def _check(answer: object) -> None:
    if isinstance(answer, Exception):
        raise OSError(str(answer))
