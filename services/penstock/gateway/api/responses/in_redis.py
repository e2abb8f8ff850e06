"""Responses in Redis: they outlast the gateway, and all gateways that use the same Redis share them.

A response is one value that expires by itself. Beside it, a sorted set per tenant and one for all tell the time of last
use and hashes the sizes, so that the bounds hold; one script per operation keeps them in agreement.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from penstock.errors import Unavailable
from penstock.gateway.api.responses.store import StoreBounds, StoredResponse
from penstock.runtime.redis_client import asked, open_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = structlog.get_logger(__name__)
_ROOT = "penstock:responses"
_PACK = msgspec.msgpack.Encoder()
_UNPACK = msgspec.msgpack.Decoder(StoredResponse)

_COMMON = """
local root = KEYS[1]
local function forget(member)
  local tenant, id = string.match(member, '^(.-) (.*)$')
  local size = tonumber(redis.call('HGET', root .. ':sizes', member) or '0')
  redis.call('DEL', root .. ':one:' .. member)
  redis.call('HDEL', root .. ':sizes', member)
  redis.call('ZREM', root .. ':used', member)
  redis.call('ZREM', root .. ':used:' .. tenant, member)
  redis.call('DECRBY', root .. ':bytes', size)
  if redis.call('ZCARD', root .. ':used:' .. tenant) == 0 then
    redis.call('DEL', root .. ':bytes:' .. tenant)
  else
    redis.call('DECRBY', root .. ':bytes:' .. tenant, size)
  end
  return size
end
local function oldest(set) return redis.call('ZRANGE', set, 0, 0)[1] end
"""
_PUT = (
    _COMMON
    + """
local tenant, id, value = ARGV[1], ARGV[2], ARGV[3]
local size, now, ttl = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local member, mine, all = tenant .. ' ' .. id, root .. ':used:' .. tenant, root .. ':used'
for _, late in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', '(' .. (now - ttl))) do forget(late) end
if redis.call('ZSCORE', all, member) then forget(member) end
redis.call('SET', root .. ':one:' .. member, value, 'PX', ttl)
redis.call('HSET', root .. ':sizes', member, size)
redis.call('ZADD', all, now, member)
redis.call('ZADD', mine, now, member)
redis.call('INCRBY', root .. ':bytes', size)
redis.call('INCRBY', root .. ':bytes:' .. tenant, size)
local function many(set, bytes, count, most)
  return redis.call('ZCARD', set) > tonumber(count) or tonumber(redis.call('GET', bytes) or '0') > tonumber(most)
end
while oldest(mine) and many(mine, root .. ':bytes:' .. tenant, ARGV[7], ARGV[8]) do forget(oldest(mine)) end
while oldest(all) and many(all, root .. ':bytes', ARGV[9], ARGV[10]) do forget(oldest(all)) end
if not oldest(all) then redis.call('DEL', root .. ':bytes') end
"""
)
_TAKE = (
    _COMMON
    + """
local tenant, now, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local found = {}
for at = 4, #ARGV do
  local member = tenant .. ' ' .. ARGV[at]
  local value = redis.call('GET', root .. ':one:' .. member)
  if value then
    redis.call('PEXPIRE', root .. ':one:' .. member, ttl)
    redis.call('ZADD', root .. ':used', 'XX', now, member)
    redis.call('ZADD', root .. ':used:' .. tenant, 'XX', now, member)
  end
  found[at - 3] = value
end
return found
"""
)
_DELETE = (
    _COMMON
    + """
local member = ARGV[1] .. ' ' .. ARGV[2]
local there = redis.call('EXISTS', root .. ':one:' .. member)
if redis.call('ZSCORE', root .. ':used', member) then forget(member) end
return there
"""
)


class RedisResponses:
    """The responses of all gateways at one Redis. Made by `open_redis_responses`."""

    def __init__(self, client: Redis, bounds: StoreBounds) -> None:
        self._bounds = bounds
        self._put = client.register_script(_PUT)
        self._take = client.register_script(_TAKE)
        self._delete = client.register_script(_DELETE)

    async def get(self, tenant: str, id: str) -> StoredResponse | None:
        """A response, or None. Raises Unavailable."""
        return (await self._find(tenant, [id]))[0]

    async def chain(self, tenant: str, id: str) -> Sequence[StoredResponse] | None:
        """A response after all that it continues; None if any of them is gone. Raises Unavailable."""
        last = await self.get(tenant, id)
        if last is None:
            return None
        found = await self._find(tenant, last.ancestors) if last.ancestors else []
        earlier = [response for response in found if response is not None]
        return [*earlier, last] if len(earlier) == len(found) else None

    async def put(self, tenant: str, response: StoredResponse) -> None:
        """Keeps a response. The least recently used ones go where it finds no room. Raises Unavailable."""
        bounds = self._bounds
        most = (bounds.tenant_count, bounds.tenant_bytes, bounds.count, bounds.bytes)
        what = (_digest(tenant), response.id, _PACK.encode(response), response.size, *self._times(), *most)
        await _wanted(self._put(keys=[_ROOT], args=what))

    async def delete(self, tenant: str, id: str) -> bool:
        """Forgets a response; whether it was there. Raises Unavailable."""
        return bool(await _wanted(self._delete(keys=[_ROOT], args=(_digest(tenant), id))))

    async def _find(self, tenant: str, ids: Sequence[str]) -> list[StoredResponse | None]:
        values = await _wanted(self._take(keys=[_ROOT], args=(_digest(tenant), *self._times(), *ids)))
        return [_whole(value) if value else None for value in values]

    def _times(self) -> tuple[int, int]:
        """Now, and how long a response is kept, in milliseconds."""
        return int(time.time() * 1000), int(self._bounds.ttl_s * 1000)


@asynccontextmanager
async def open_redis_responses(url: str, bounds: StoreBounds) -> AsyncIterator[RedisResponses]:
    """The store at a Redis for the length of the block. It need not be reachable yet. Raises ConfigError."""
    async with open_redis("responses_store", url) as client:
        yield RedisResponses(client, bounds)


async def _wanted(call: Awaitable[Any]) -> Any:
    try:
        return await asked(call)
    except OSError:
        what = "the store of responses cannot be reached; try again, or send store: false and the whole input"
        raise Unavailable(what, code="store_unavailable", retry_after=1) from None


def _whole(value: bytes) -> StoredResponse | None:
    """What was kept; None, as if it were gone, where the bytes are no response of this version's."""
    try:
        return _UNPACK.decode(value)
    except msgspec.DecodeError:
        _log.warning("a stored response is damaged or another version's; it counts as gone")
        return None


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()
