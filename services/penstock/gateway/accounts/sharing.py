"""The limits of tenants over all gateways that share a ledger, in Redis: told behind the requests, which never wait.

Redis holds each bucket of a tenant as it is after what everybody took, and how many requests each gateway has running.
One task tells what has changed and hears the rest, in one round trip, at most ten times a second. So tenants get their
rate once, however many gateways they ask; what they get beyond it is what gateways admit between two round trips.
Without Redis each gateway goes on by itself, and tells later what it has taken.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from penstock.gateway.accounts.books import RedisBook, SqliteBook
from penstock.gateway.accounts.ledger import UsageLedger
from penstock.gateway.accounts.limiter import Limiter, TenantUse
from penstock.runtime.redis_client import asked, in_step
from penstock.runtime.tasks import Failed, beside

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PAUSE_S = 0.1
"""Least between two round trips."""
_IDLE_S = 1.0
"""Most between them, as long as there are tenants to hear of."""
_RECENT_S = 120.0
"""For so long after a request others are heard about its tenant: twice the time in which a bucket is full."""
_LEASE_S = 5.0
"""What a gateway said about requests that run counts for so long."""
_BATCH = 256
"""Tenants in one round trip."""
_LONGEST_S = 86_400
"""For which a debt is kept at most."""
_EXCHANGE = f"""
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local kept, answer = {_RECENT_S * 1000:.0f}, {{0}}
for at = 3, #ARGV, 5 do
  local rate, own, taken = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local mine = 'taken:' .. ARGV[1] .. ':' .. ARGV[at]
  local found = redis.call('HMGET', KEYS[1], ARGV[at], ARGV[at] .. ':at', mine)
  local level, since = tonumber(found[1] or ''), tonumber(found[2] or '')
  local told = tonumber(found[3] or '') or tonumber(ARGV[at + 4])
  redis.call('HSET', KEYS[1], mine, ARGV[at + 3])
  if level and since then
    level = math.min(rate, level + math.max(0, now - since) * rate / 60000 - (taken - told))
  else
    level = own
  end
  redis.call('HSET', KEYS[1], ARGV[at], string.format('%.3f', level), ARGV[at] .. ':at', now)
  if rate > 0 then kept = math.max(kept, (rate - level) * 60000 / rate) end
  table.insert(answer, string.format('%.3f', level))
end
redis.call('HSET', KEYS[1], 'live:' .. ARGV[1], ARGV[2] .. ' ' .. now)
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
  if string.sub(all[at], 1, 5) == 'live:' and all[at] ~= 'live:' .. ARGV[1] then
    local count, said = string.match(all[at + 1], '^(%d+) (%d+)$')
    if count and now - said < {_LEASE_S * 1000:.0f} then
      answer[1] = answer[1] + count
    else
      local name = string.sub(all[at], 6)
      redis.call('HDEL', KEYS[1], all[at], 'taken:' .. name .. ':requests', 'taken:' .. name .. ':tokens')
    end
  end
end
redis.call('PEXPIRE', KEYS[1], math.floor(math.min(kept, {_LONGEST_S * 1000})))
return answer
"""
"""KEYS a tenant's hash; ARGV the gateway's name, how many requests run there, and for each bucket its kind, what it
gets per minute, its level as the gateway knows it, and what the gateway has ever taken out of it, now and when it last
had an answer: so nothing is taken twice when an answer gets lost. Gives how many requests run elsewhere, and the level
of each bucket. What is no hash there is not ours, and is begun anew."""


class SharedLimits:
    """One gateway's part. Run `keep` beside the gateway."""

    def __init__(self, redis: Redis | None, limiter: Limiter, ledger: UsageLedger) -> None:
        """Without `redis`, as with a ledger in a file, gateways share what was spent alone."""
        limiter.shared = True
        self._redis = redis
        self._limiter = limiter
        self._ledger = ledger
        self._name = secrets.token_hex(8)
        self._all_at = -1e9
        self._heard_at = time.monotonic()
        self._behind = False
        self._log = structlog.get_logger("penstock.gateway")

    async def keep(self) -> None:
        """Never returns; cancel it."""
        await in_step(self.round, self._fail, self._limiter.stirred, pause_s=_PAUSE_S, idle_s=_IDLE_S)

    async def round(self) -> None:
        """Tells what has changed, and hears of everybody who was here lately once a second. Raises OSError."""
        now = time.monotonic()
        names = dict.fromkeys(self._limiter.changed(_BATCH))
        if now - self._all_at >= _IDLE_S:
            names |= dict.fromkeys(self._limiter.about(_RECENT_S))
            self._all_at = now
        order = [*names]
        for start in range(0, len(order), _BATCH):
            await self._exchange(order[start : start + _BATCH])
        limits = self._ledger.terms.limits
        await self._ledger.learn_spent([name for name in order if limits(name).spend_per_day is not None])
        self._heard_at = time.monotonic()
        if self._behind:
            self._behind = False
            self._log.info("the limits are shared again")

    async def _exchange(self, names: Sequence[str]) -> None:
        uses = {name: self._limiter.tell(name) for name in names}
        if self._redis is None:
            return
        pipe = self._redis.pipeline(transaction=False)
        for name, use in uses.items():
            pipe.eval(_EXCHANGE, 1, _key(name), self._name, use.live, *_buckets(use))
        try:
            answers = await asked(pipe.execute()) if uses else []
        except OSError:
            self._limiter.note(names)
            raise
        for (name, use), answer in zip(uses.items(), answers, strict=True):
            elsewhere, *levels = answer
            self._limiter.hear(name, use, int(elsewhere), dict(zip(use.buckets, map(float, levels), strict=True)))

    def _fail(self, error: OSError) -> None:
        if time.monotonic() - self._heard_at > _LEASE_S:
            self._limiter.alone()
        if not self._behind:
            self._behind = True
            self._log.warning("limits can't be shared now; this gateway goes on by itself", reason=str(error))


def _buckets(use: TenantUse) -> list[str | float]:
    return [part for kind, values in use.buckets.items() for part in (kind, *values)]


def _key(tenant: str) -> str:
    return f"penstock:limits:{{{hashlib.sha256(tenant.encode()).hexdigest()[:40]}}}"


@asynccontextmanager
async def sharing(limiter: Limiter, ledger: UsageLedger, failed: Failed) -> AsyncIterator[None]:
    """Shares the limits with all gateways of the same ledger for the length of the block; with none where the ledger is
    this process's own."""
    book = ledger.book
    if not isinstance(book, RedisBook | SqliteBook):
        yield
        return
    shared = SharedLimits(book.redis if isinstance(book, RedisBook) else None, limiter, ledger)
    async with beside(shared.keep, name="limits", on_failure="restart", failed=failed):
        yield
