"""What one tenant may have: requests and tokens per minute, requests at one time, money per day.

Admission is one step of the event loop, right after the key and together with the place in the gateway (`admission`):
either all of it is taken or nothing. A minute's
allowance is a bucket that fills evenly. Tokens are taken when they are known, which may be more than there are: then
the bucket is in debt, and the next request has to come back when it is filled. So over time no tenant gets more than
its rate, and nobody has to guess how long an answer will be.

Gateways that share a ledger in Redis share the limits too: `sharing` carries between them what is taken, behind the
requests, which never wait for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from penstock.errors import RateLimited
from penstock.gateway.accounts.terms import Limits, Terms

_MINUTE_S = 60.0
_DAY_S = 86_400


@dataclass(slots=True)
class Bucket:
    """An allowance per minute. Holds at most that of one minute."""

    per_minute: int
    level: float
    at: float
    """When `level` was right."""

    def fill(self, now: float) -> None:
        """Adds what came since."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / _MINUTE_S)
        self.at = now

    def wait_s(self, wanted: float) -> float:
        """Seconds until it holds `wanted`."""
        missing = wanted - self.level
        return 0.0 if missing <= 0 else missing * _MINUTE_S / self.per_minute if self.per_minute else math.inf


@dataclass(slots=True)
class _Tenant:
    limits: Limits
    live: int = 0
    elsewhere: int = 0
    """Requests that run at other gateways, as far as they have said so."""
    buckets: dict[str, Bucket] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)
    """What was ever taken out of each bucket here."""
    told: Mapping[str, float] = field(default_factory=dict)
    """As much of that as others surely know of."""
    seen_at: float = 0.0
    """When it last wanted something."""

    def take(self, kind: str, amount: int) -> None:
        """Takes from a bucket, if there is one."""
        if (bucket := self.buckets.get(kind)) is not None:
            bucket.level -= amount
            self.taken[kind] += amount


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUse:
    """What a gateway tells the others of one tenant."""

    live: int
    buckets: Mapping[str, tuple[int, float, float, float]]
    """By kind: per minute, the level as this gateway knows it, what it has ever taken, and what others surely know of
    that."""


class Limiter:
    """Counts what tenants have, at this gateway and, where somebody carries it between them, at all."""

    def __init__(
        self, terms: Terms, spent_today: Callable[[str], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`spent_today` knows what a tenant has spent since midnight, UTC."""
        self._terms = terms
        self._spent_today = spent_today
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self.shared = False
        """Whether somebody carries what changes to other gateways; else it is not noted."""
        self.stirred = asyncio.Event()
        """Set as long as there is something to tell."""
        self._changed: OrderedDict[str, None] = OrderedDict()

    def check(self, name: str) -> None:
        """Raises RateLimited when the tenant may not begin a request now; takes nothing."""
        self._check(name, self._known(name))

    def check_money(self, name: str) -> None:
        """Raises RateLimited when the tenant has spent what it may today; nothing else is looked at."""
        self._check_money(name, self._terms.limits(name))

    @contextmanager
    def one(self, name: str) -> Iterator[Callable[[], None]]:
        """One request of the tenant, for the length of the block, or until what it gives is called: before the client
        can know that its request has ended, and send the next. Raises RateLimited."""
        tenant = self._known(name)
        self._check(name, tenant)
        tenant.take("requests", 1)
        self._count(name, tenant, 1)
        with ExitStack() as place:
            place.callback(self._count, name, tenant, -1)
            yield place.close

    def weight(self, name: str) -> float:
        """The tenant's share beside others."""
        return self._known(name).limits.weight

    def spend(self, name: str, tokens: int) -> None:
        """Takes tokens that a request has used."""
        tenant = self._known(name)
        tenant.take("tokens", tokens)
        self._note(name, tenant)

    def headers(self, name: str) -> Mapping[str, str]:
        """OpenAI's x-ratelimit headers, for what is limited."""
        return {
            f"x-ratelimit-{what}-{kind}": value
            for kind, bucket in self._known(name).buckets.items()
            for what, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", str(max(0, math.floor(bucket.level)))),
                ("reset", f"{bucket.wait_s(bucket.per_minute):.3f}s"),
            )
        }

    # The carrier's side.

    def changed(self, most: int) -> list[str]:
        """Tenants of whom others don't know everything; each is given once."""
        names = [self._changed.popitem(last=False)[0] for _ in range(min(most, len(self._changed)))]
        if not self._changed:
            self.stirred.clear()
        return names

    def about(self, within_s: float) -> list[str]:
        """Tenants with limits that were here within so many seconds, or have requests that run."""
        since = self._clock() - within_s
        return [
            name
            for name, tenant in self._tenants.items()
            if tenant.limits.any and (tenant.live or tenant.seen_at >= since)
        ]

    def tell(self, name: str) -> TenantUse:
        """What others have to know of it."""
        tenant, now = self._tenants[name], self._clock()
        buckets = {}
        for kind, bucket in tenant.buckets.items():
            bucket.fill(now)
            buckets[kind] = (bucket.per_minute, bucket.level, tenant.taken[kind], tenant.told.get(kind, 0))
        return TenantUse(live=tenant.live, buckets=buckets)

    def note(self, names: Iterable[str]) -> None:
        """What was given to tell of these may not have been told."""
        for name in names:
            self._note(name, self._tenants[name])

    def hear(self, name: str, use: TenantUse, elsewhere: int, levels: Mapping[str, float]) -> None:
        """The answer to `use`: how many requests run at others, and what all have left in each bucket."""
        tenant, now = self._tenants[name], self._clock()
        tenant.elsewhere = elsewhere
        tenant.told = {kind: taken for kind, (_, _, taken, _) in use.buckets.items()}
        for kind, level in levels.items():
            bucket = tenant.buckets[kind]
            bucket.level, bucket.at = level - (tenant.taken[kind] - tenant.told[kind]), now

    def alone(self) -> None:
        """Nobody else can be heard: what runs elsewhere counts no more."""
        for tenant in self._tenants.values():
            tenant.elsewhere = 0

    def _count(self, name: str, tenant: _Tenant, more: int) -> None:
        tenant.live += more
        self._note(name, tenant)

    def _note(self, name: str, tenant: _Tenant) -> None:
        if self.shared and tenant.limits.any:
            self._changed[name] = None
            self.stirred.set()

    def _known(self, name: str) -> _Tenant:
        """The tenant, with its buckets filled up to now."""
        found, now = self._tenants.get(name), self._clock()
        if found is None:
            limits = self._terms.limits(name)
            found = self._tenants[name] = _Tenant(limits)
            for kind, rate in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
                if rate is not None:
                    found.buckets[kind] = Bucket(rate, rate, now)
        found.seen_at = now
        for bucket in found.buckets.values():
            bucket.fill(now)
        return found

    def _check(self, name: str, tenant: _Tenant) -> None:
        limits = tenant.limits
        if limits.concurrency is not None and tenant.live + tenant.elsewhere >= limits.concurrency:
            raise RateLimited(
                f"{limits.concurrency} requests of this account run already, its limit; wait for one to end",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        for kind, bucket in tenant.buckets.items():
            # Tokens are known afterwards: whoever is not in debt may begin.
            wait = bucket.wait_s(1 if bucket.per_minute else math.inf)
            if wait > 0:
                raise RateLimited(
                    f"the limit of {bucket.per_minute} {kind} per minute is used up",
                    code="rate_limit_exceeded",
                    retry_after=min(wait, _DAY_S),
                )
        self._check_money(name, limits)

    def _check_money(self, name: str, limits: Limits) -> None:
        if limits.spend_per_day is not None and self._spent_today(name) >= limits.spend_per_day:
            limit = f"{limits.spend_per_day:g} {self._terms.currency} per day"
            what = f"the limit of {limit} is used up; the day ends at midnight, UTC"
            raise RateLimited(what, code="insufficient_quota", retry_after=_DAY_S - time.time() % _DAY_S)
