"""What one tenant may have: requests and tokens per minute, requests at one time, money per day.

Admission is one step of the event loop, right after the key and together with the place in the gateway (`admission`):
either all of it is taken or nothing. A minute's
allowance is a bucket that fills evenly. Tokens are taken when they are known, which may be more than there are: then
the bucket is in debt, and the next request has to come back when it is filled. So over time no tenant gets more than
its rate, and nobody has to guess how long an answer will be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
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
    requests: Bucket | None = None
    tokens: Bucket | None = None
    live: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def leave(self) -> None:
        """One request has ended."""
        self.live -= 1


class Limiter:
    """Counts what tenants have; one per gateway, so several gateways give each its own."""

    def __init__(
        self, terms: Terms, spent_today: Callable[[str], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`spent_today` knows what a tenant has spent since midnight, UTC."""
        self._terms = terms
        self._spent_today = spent_today
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def check(self, name: str) -> None:
        """Raises RateLimited when the tenant may not begin a request now; takes nothing."""
        self._check(name, self._known(name))

    @contextmanager
    def one(self, name: str) -> Iterator[Callable[[], None]]:
        """One request of the tenant, for the length of the block, or until what it gives is called: before the client
        can know that its request has ended, and send the next. Raises RateLimited."""
        tenant = self._known(name)
        self._check(name, tenant)
        if tenant.requests is not None:
            tenant.requests.level -= 1
        tenant.live += 1
        with ExitStack() as place:
            place.callback(tenant.leave)
            yield place.close

    def weight(self, name: str) -> float:
        """The tenant's share beside others."""
        return self._known(name).limits.weight

    def spend(self, name: str, tokens: int) -> None:
        """Takes tokens that a request has used."""
        bucket = self._known(name).tokens
        if bucket is not None:
            bucket.level -= tokens

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

    def _known(self, name: str) -> _Tenant:
        """The tenant, with its buckets filled up to now."""
        found, now = self._tenants.get(name), self._clock()
        if found is None:
            limits = self._terms.limits(name)
            found = self._tenants[name] = _Tenant(limits)
            for kind, rate in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
                if rate is not None:
                    found.buckets[kind] = Bucket(rate, rate, now)
            found.requests, found.tokens = found.buckets.get("requests"), found.buckets.get("tokens")
        for bucket in found.buckets.values():
            bucket.fill(now)
        return found

    def _check(self, name: str, tenant: _Tenant) -> None:
        limits = tenant.limits
        if limits.concurrency is not None and tenant.live >= limits.concurrency:
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
        if limits.spend_per_day is not None and self._spent_today(name) >= limits.spend_per_day:
            limit = f"{limits.spend_per_day:g} {self._terms.currency} per day"
            what = f"the limit of {limit} is used up; the day ends at midnight, UTC"
            raise RateLimited(what, code="insufficient_quota", retry_after=_DAY_S - time.time() % _DAY_S)
