"""Where the ledger is written: in memory, in an SQLite file, or in a Redis that several gateways share.

Each book only adds, so gateways may write at the same time, and a sum is the sum over all of them.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import structlog

from penstock.gateway.accounts.entry import COUNTS, HOUR_S, Counts, Entries, LedgerLine, merged
from penstock.runtime.config import ConfigError
from penstock.runtime.redis_client import REDIS_SCHEMES, RedisRefused, asked, open_redis, without_password
from penstock.runtime.threads import started_threads

if TYPE_CHECKING:
    from redis.asyncio import Redis

Result = TypeVar("Result")

_KEPT_S = 400 * 24 * HOUR_S
"""How long Redis keeps an hour."""
_BUSY_S = 10.0
_GREET_S = 2.0
"""Most that a gateway waits for a Redis before it serves."""
_DAY_S = 24 * HOUR_S
_FIELDS = 512
"""Counts that are read out of Redis and decoded at a time."""


class LedgerBatch(NamedTuple):
    """Whose batch it is, and which: each writer's numbers grow, and none is written before the one before it is."""

    writer: str
    number: int


class Book(Protocol):
    """What the ledger is written in."""

    async def add(self, entries: Entries, batch: LedgerBatch) -> None:
        """Adds all of them, once for each batch. OSError: none were added, or nobody knows."""

    async def read(self, since: int, until: int, tenant: str | None) -> dict[LedgerLine, Counts]:
        """The entries of the hours that begin in [since, until), of one tenant or of all. The dictionary is the
        caller's, its values are not. Raises OSError."""

    async def spent(self, day: int, tenants: Sequence[str]) -> Sequence[int]:
        """What each has spent on the day that begins then, in billionths. Raises OSError."""


class MemoryBook:
    """Forgets with the process."""

    def __init__(self) -> None:
        self._hours: dict[int, dict[LedgerLine, Counts]] = {}

    async def add(self, entries: Entries, batch: LedgerBatch) -> None:
        """Adds all of them; can't fail."""
        for line, counts in entries.items():
            hour = self._hours.setdefault(line.hour, {})
            hour |= merged([(line, hour.get(line, Counts())), (line, counts)])

    async def read(self, since: int, until: int, tenant: str | None) -> dict[LedgerLine, Counts]:
        """The entries in the range."""
        found: dict[LedgerLine, Counts] = {}
        for hour in sorted(hour for hour in self._hours if since <= hour < until):
            lines = self._hours[hour].items()
            found.update((line, counts) for line, counts in lines if tenant in (None, line.tenant))
            await asyncio.sleep(0)
        return found

    async def spent(self, day: int, tenants: Sequence[str]) -> Sequence[int]:
        """By nobody but this process."""
        spent: Counter[str] = Counter()
        for line, counts in (await self.read(day, day + _DAY_S, None)).items():
            spent[line.tenant] += counts.cost_nano
        return [spent[tenant] for tenant in tenants]


class SqliteBook:
    """A file. Its one connection lives in a thread of its own; a write is on the disk when `add` returns."""

    _ADD = (
        f"INSERT INTO usage (hour, tenant, model, {', '.join(COUNTS)}) VALUES ({', '.join('?' * (3 + len(COUNTS)))}) "
        "ON CONFLICT (hour, tenant, model) DO UPDATE SET "
        + ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
    )
    _SPENT = "SELECT SUM(cost_nano) FROM usage WHERE hour >= ? AND hour < ? AND tenant = ?"
    _READ = f"SELECT hour, tenant, model, {', '.join(COUNTS)} FROM usage WHERE hour >= ? AND hour < ?"
    _NEXT = "SELECT MIN(hour) FROM usage WHERE hour >= ? AND hour < ?"

    def __init__(self, database: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._database = database
        self._thread = thread

    async def add(self, entries: Entries, batch: LedgerBatch) -> None:
        """Adds all of them in one transaction, which has failed if it raises."""
        rows = [(*account, *(getattr(counts, name) for name in COUNTS)) for account, counts in entries.items()]

        def write() -> None:
            with self._database:
                self._database.executemany(self._ADD, rows)

        await self._run(write)

    async def read(self, since: int, until: int, tenant: str | None) -> dict[LedgerLine, Counts]:
        """The entries in the range, hour by hour, so that others have the thread in between."""
        found: dict[LedgerLine, Counts] = {}
        where, values = ("", ()) if tenant is None else (" AND tenant = ?", (tenant,))

        def look(since: int) -> int:
            [[hour]] = self._database.execute(self._NEXT, (since, until))
            if hour is None:
                return until
            for row in self._database.execute(self._READ + where, (hour, hour + 1, *values)):
                found[LedgerLine(*row[:3])] = Counts(*row[3:])
            return cast("int", hour) + 1

        while since < until:
            since = await self._run(partial(look, since))
        return found

    async def spent(self, day: int, tenants: Sequence[str]) -> Sequence[int]:
        """By all that write into the file."""
        found: list[int] = []

        def look() -> None:
            for tenant in tenants:
                [row] = self._database.execute(self._SPENT, (day, day + _DAY_S, tenant))
                found.append(row[0] or 0)

        await self._run(look)
        return found

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise OSError(f"the ledger's file: {error}") from None


class RedisBook:
    """A hash for each hour; its fields are `[tenant, model, count]`. And one for each day, with what tenants spent."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._add = redis.register_script(_ADD_ONCE)

    async def add(self, entries: Entries, batch: LedgerBatch) -> None:
        """Adds all of them in one script, which remembers each writer's last batch: an answer may get lost on its way,
        and what was asked come late."""
        triples = [
            (account.hour, json.dumps([account.tenant, account.model, name]), amount)
            for account, counts in entries.items()
            for name in COUNTS
            if (amount := getattr(counts, name))
        ]
        spent = [
            (account.hour - account.hour % _DAY_S, account.tenant, counts.cost_nano)
            for account, counts in entries.items()
            if counts.cost_nano
        ]
        terms = batch.number, _KEPT_S, len(triples)
        await asked(self._add(keys=[f"penstock:usage:writer:{batch.writer}"], args=[*terms, *chain(*triples, *spent)]))

    async def read(self, since: int, until: int, tenant: str | None) -> dict[LedgerLine, Counts]:
        """The entries in the range, few at a time, so that others have the event loop in between."""
        found: dict[LedgerLine, Counts] = {}
        hours = cast("list[bytes]", await asked(self.redis.zrangebyscore(_HOURS, since, f"({until}")))
        for hour in map(int, hours):
            cursor, first = 0, True
            while cursor or first:
                first = False
                page = await asked(self.redis.hscan(_hour_key(hour), cursor, count=_FIELDS))
                cursor, fields = cast("tuple[int, dict[bytes, bytes]]", page)
                for field, amount in fields.items():  # one that comes twice says the same, or what is newer
                    whose, model, name = json.loads(field)
                    if tenant in (None, whose) and name in COUNTS:
                        setattr(found.setdefault(LedgerLine(hour, whose, model), Counts()), name, int(amount))
        return found

    async def spent(self, day: int, tenants: Sequence[str]) -> Sequence[int]:
        """By all gateways."""
        if not tenants:
            return []
        return [int(amount or 0) for amount in await asked(self.redis.hmget(f"{_SPENT}:{day}", list(tenants)))]


_HOURS = "penstock:usage:hours"
_SPENT = "penstock:usage:spent"
_ADD_ONCE = f"""
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[1]) then return end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
local hours = 3 + 3 * ARGV[3]
for at = 4, hours, 3 do
  local key = 'penstock:usage:' .. ARGV[at]
  redis.call('HINCRBY', key, ARGV[at + 1], ARGV[at + 2])
  redis.call('EXPIRE', key, ARGV[2])
  redis.call('ZADD', '{_HOURS}', ARGV[at], ARGV[at])
end
for at = hours + 1, #ARGV, 3 do
  local key = '{_SPENT}:' .. ARGV[at]
  redis.call('HINCRBY', key, ARGV[at + 1], ARGV[at + 2])
  redis.call('EXPIRE', key, {2 * _DAY_S})
end
"""


def _hour_key(hour: int) -> str:
    return f"penstock:usage:{hour}"


@asynccontextmanager
async def open_book(where: str) -> AsyncIterator[Book]:
    """The book at `where`: a file, `redis://...`, or memory when it is empty. Raises ConfigError; a Redis need not be
    there yet."""
    if not where:
        yield MemoryBook()
    elif where.startswith(REDIS_SCHEMES):
        async with open_redis("ledger", where) as redis:
            await _greet(redis, where)
            yield RedisBook(redis)
    else:
        with started_threads(1, "ledger") as thread:
            run = asyncio.get_running_loop().run_in_executor
            database = await run(thread, _connect, where)
            try:
                yield SqliteBook(database, thread)
            finally:
                await run(thread, database.close)


async def _greet(redis: Redis, where: str) -> None:
    """Raises ConfigError for a Redis that refuses: that does not mend itself, as its absence does."""
    at = without_password(where)
    try:
        async with asyncio.timeout(_GREET_S):
            await asked(redis.ping())
    except RedisRefused as error:
        raise ConfigError("ledger", at, f"refuses: {error}") from None
    except OSError as error:  # a TimeoutError is one
        log = structlog.get_logger("penstock.gateway")
        log.warning("the ledger's Redis does not answer; the gateway begins without it", at=at, reason=str(error))


def _connect(path: str) -> sqlite3.Connection:
    columns = ", ".join(f"{name} INTEGER NOT NULL" for name in COUNTS)
    try:
        database = sqlite3.connect(path, timeout=_BUSY_S)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        with closing(database.cursor()) as cursor:
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS usage (hour INTEGER, tenant TEXT, model TEXT, {columns}, "
                "PRIMARY KEY (hour, tenant, model)) WITHOUT ROWID"
            )
        return database
    except sqlite3.Error as error:
        raise ConfigError("ledger", path, f"cannot be used: {error}") from None
