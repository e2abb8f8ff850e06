"""Files and batches in a Redis, for gateways of several hosts: as durable as that Redis is.

A tenant has a hash of its files and one of its batches; the bytes of a file are a list of pieces. Who runs a batch has
a lease, a key with a token that expires; each of its writes is a script that compares the token, so one that comes
after its lease is refused, whoever has the batch by then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from penstock.gateway.batches.records import StoredBatch, StoredFile
from penstock.gateway.batches.store import BatchClaim, ClaimLost, DamagedRecord, DamagedRecords, tenant_name
from penstock.runtime.redis_client import asked, open_redis
from penstock.runtime.tasks import Failed, beside

if TYPE_CHECKING:
    from redis.asyncio import Redis

Record = TypeVar("Record", StoredFile, StoredBatch)
_ROOT = "penstock:batches"
_OPEN = f"{_ROOT}:open"
_TENANTS = f"{_ROOT}:tenants"
LEASE_S = 10.0
"""After so long without a word from who runs a batch another gateway takes it up."""
_RENEWALS = 4
_PIECES = 64
"""Read in one round trip."""
_ARRIVING_S = 86_400
"""An upload that has not come to its end by then never will."""
_WRITE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local at = 3
for key = 2, 3 do
  local last = at + tonumber(ARGV[at - 1])
  for line = at, last - 1 do redis.call('RPUSH', KEYS[key], ARGV[line]) end
  at = last + 1
end
return 1
"""
"""KEYS the lease, the list of answers, that of errors; ARGV the token, the number of answers, these, the number of
errors, these."""
_SAVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if ARGV[4] == 'over' then redis.call('ZREM', KEYS[3], ARGV[5]) end
return 1
"""
"""KEYS the lease, the tenant's batches, the open ones; ARGV the token, the batch's id, its record, whether it is over,
its name among the open ones."""
_RENEW = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class RedisBatches:
    """Made by `open_redis_batches`."""

    def __init__(self, redis: Redis, failed: Failed, lease_s: float = LEASE_S) -> None:
        self._redis = redis
        self._damaged = DamagedRecords()
        self._failed = failed
        self._lease_s = lease_s
        self.write_lines = redis.register_script(_WRITE)
        self.save = redis.register_script(_SAVE)
        self._renew = redis.register_script(_RENEW)
        self._release = redis.register_script(_RELEASE)

    async def write(self, tenant: str, file: str, pieces: AsyncIterator[bytes]) -> None:
        """Keeps the bytes of a file, which go by themselves unless it is shown in time."""
        key = _data(tenant, file)
        await asked(self._redis.sadd(_TENANTS, tenant_name(tenant)))
        try:
            async for piece in pieces:
                await asked(self._redis.rpush(key, piece))
                await asked(self._redis.expire(key, _ARRIVING_S))
        except BaseException:
            with suppress(OSError):
                await asked(self._redis.unlink(key))
            raise

    async def add_file(self, file: StoredFile) -> None:
        """Shows a file."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.persist(_data(file.tenant, file.id))
        pipe.hset(_files(file.tenant), file.id, msgspec.json.encode(file))
        pipe.sadd(_TENANTS, tenant_name(file.tenant))
        await asked(pipe.execute())

    async def files(self, tenant: str) -> list[StoredFile]:
        """All files of a tenant."""
        return await self._all(_files(tenant), StoredFile)

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        """One of them."""
        return await self._one(_files(tenant), id, StoredFile)

    async def read(self, tenant: str, file: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file in pieces."""
        at = 0
        while pieces := await asked(self._redis.lrange(_data(tenant, file), at, at + _PIECES - 1)):
            for piece in pieces:
                yield _bytes(piece)
            at += len(pieces)

    async def delete_file(self, tenant: str, id: str) -> bool:
        """Deletes a file."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hdel(_files(tenant), id)
        pipe.unlink(_data(tenant, id))
        return bool((await asked(pipe.execute()))[0])

    async def add_batch(self, batch: StoredBatch) -> None:
        """Begins a batch."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hset(_batches(batch.tenant), batch.id, msgspec.json.encode(batch))
        pipe.sadd(_TENANTS, tenant_name(batch.tenant))
        pipe.zadd(_OPEN, {_name(batch): batch.expires_at})
        await asked(pipe.execute())

    async def batches(self, tenant: str) -> list[StoredBatch]:
        """All batches of a tenant."""
        found = await self._all(_batches(tenant), StoredBatch)
        marks = await asked(self._redis.hgetall(_cancels(tenant)))
        since = {_text(id): int(mark) for id, mark in marks.items()}
        return [batch.cancelling(since.get(batch.id)) for batch in found]

    async def batch(self, tenant: str, id: str) -> StoredBatch | None:
        """One of them."""
        return await self._known(tenant_name(tenant), id)

    async def cancel(self, batch: StoredBatch, now: int) -> None:
        """Whoever runs the batch shall cancel it."""
        await asked(self._redis.hsetnx(_cancels(batch.tenant), batch.id, str(now)))

    async def open_batches(self) -> list[StoredBatch]:
        """Batches of all tenants that are not over, those whose window ends first before the others."""
        listed = cast("list[bytes]", await asked(self._redis.zrange(_OPEN, 0, -1)))
        found = []
        for name in listed:
            tenant, id = _text(name).split(" ", 1)
            try:
                batch = await self._known(tenant, id)
            except DamagedRecord as error:
                self._damaged.leave_out(error)
                continue
            if batch is not None and not batch.over:
                found.append(batch)
        return found

    @asynccontextmanager
    async def claim(self, batch: StoredBatch) -> AsyncIterator[BatchClaim | None]:
        """The right to run a batch."""
        key, token = _lease(batch), secrets.token_hex(16)
        if not await asked(self._redis.set(key, token, nx=True, px=self._lease_ms)):
            yield None
            return
        try:
            found = await self.batch(batch.tenant, batch.id)
            if found is None or found.over:
                yield None
                return
            claim = _RedisClaim(self, found, token)

            async def renew() -> None:
                loop = asyncio.get_running_loop()
                until = loop.time() + self._lease_s
                while loop.time() < until:
                    await asyncio.sleep(self._lease_s / _RENEWALS)
                    asked_at = loop.time()
                    with suppress(OSError):
                        if not await asked(self._renew(keys=[key], args=[token, self._lease_ms])):
                            break
                        until = asked_at + self._lease_s
                claim.gone.set()

            async with beside(renew, name="lease of a batch", on_failure="restart", failed=self._failed):
                yield claim
        finally:
            with suppress(OSError):
                await asked(self._release(keys=[key], args=[token]))

    async def sweep(self, now: float, kept_s: float) -> None:
        """Deletes what is kept no longer."""
        inputs = {batch.input_file_id for batch in await self.open_batches()}
        for name in await asked(self._redis.smembers(_TENANTS)):
            root = f"{_ROOT}:{_text(name)}"
            try:
                files = await self._all(f"{root}:files", StoredFile)
                batches = await self._all(f"{root}:batches", StoredBatch)
                for batch in batches:
                    if not batch.over:
                        await self._known(_text(name), batch.id)  # and the wish that it be cancelled
            except DamagedRecord as error:  # which may need what others do not
                self._damaged.leave_out(error)
                continue
            for file in files:
                if file.expires_at <= now and file.id not in inputs:
                    await self.delete_file(file.tenant, file.id)
            for batch in batches:
                if batch.over and batch.over_at + kept_s <= now:
                    await asked(self._redis.hdel(f"{root}:batches", batch.id))
                    await asked(self._redis.hdel(f"{root}:cancelled", batch.id))

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    async def _known(self, tenant: str, id: str) -> StoredBatch | None:
        found = await self._one(f"{_ROOT}:{tenant}:batches", id, StoredBatch)
        mark = await asked(self._redis.hget(f"{_ROOT}:{tenant}:cancelled", id))
        try:
            return found and found.cancelling(None if mark is None else int(mark))
        except ValueError:
            raise DamagedRecord(f"{id}: {mark!r} is no time") from None

    async def _one(self, key: str, id: str, kind: type[Record]) -> Record | None:
        data = await asked(self._redis.hget(key, id))
        return None if data is None else _read(_bytes(data), kind, id)

    async def _all(self, key: str, kind: type[Record]) -> list[Record]:
        found = await asked(self._redis.hgetall(key))
        return [_read(_bytes(data), kind, repr(id)) for id, data in found.items()]


class _RedisClaim:
    """Holds the lease of a batch."""

    def __init__(self, store: RedisBatches, batch: StoredBatch, token: str) -> None:
        self.batch = batch
        self.gone = asyncio.Event()
        self._store = store
        self._token = token

    async def append(self, answers: Sequence[bytes], errors: Sequence[bytes]) -> None:
        """Adds lines to the files of its results."""
        if not (answers or errors):
            return
        batch = self.batch
        keys = [_lease(batch), *(_data(batch.tenant, batch.results(ok)) for ok in (True, False))]
        args: list[str | bytes | int] = [self._token, len(answers), *answers, len(errors), *errors]
        self._check(await asked(self._store.write_lines(keys=keys, args=args)))

    async def save(self, batch: StoredBatch) -> None:
        """Keeps the batch as it is now."""
        keys = [_lease(batch), _batches(batch.tenant), _OPEN]
        over = "over" if batch.over else ""
        args: list[str | bytes] = [self._token, batch.id, msgspec.json.encode(batch), over, _name(batch)]
        self._check(await asked(self._store.save(keys=keys, args=args)))
        self.batch = batch

    async def lost(self) -> None:
        """Returns when the lease is lost, or could not be renewed in time."""
        await self.gone.wait()

    def _check(self, written: object) -> None:
        if not written:
            self.gone.set()
            raise ClaimLost


@asynccontextmanager
async def open_redis_batches(url: str, failed: Failed, lease_s: float = LEASE_S) -> AsyncIterator[RedisBatches]:
    """The store at a Redis for the length of the block; it need not be reachable yet. Raises ConfigError."""
    async with open_redis("batch_store", url) as redis:
        yield RedisBatches(redis, failed, lease_s)


def _read(data: bytes, kind: type[Record], id: str) -> Record:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedRecord(f"{id} is no record of a {kind.__name__}: {error}") from None


def _bytes(value: bytes | str) -> bytes:
    assert isinstance(value, bytes), "the client gives bytes"
    return value


def _text(value: bytes | str) -> str:
    return _bytes(value).decode()


def _name(batch: StoredBatch) -> str:
    """Among the open ones of all tenants."""
    return f"{tenant_name(batch.tenant)} {batch.id}"


def _files(tenant: str) -> str:
    return f"{_ROOT}:{tenant_name(tenant)}:files"


def _batches(tenant: str) -> str:
    return f"{_ROOT}:{tenant_name(tenant)}:batches"


def _cancels(tenant: str) -> str:
    return f"{_ROOT}:{tenant_name(tenant)}:cancelled"


def _data(tenant: str, file: str) -> str:
    return f"{_ROOT}:{tenant_name(tenant)}:data:{file}"


def _lease(batch: StoredBatch) -> str:
    return f"{_ROOT}:{tenant_name(batch.tenant)}:lease:{batch.id}"
