"""What a plan allows its workers, and how they know that a router has made it.

A worker gives each router that it joins a key of its own. For each plan the router authenticates, under the key of each
worker of the plan, what the plan is about (HMAC, RFC 2104). A worker does what it has such a capability for, and no
more: for this request, this tenant, with these stores and this other worker. It does so once: each plan has another
epoch, also those of one request, and a worker remembers what it was shown for as long as it would believe it. Whoever
has broken into a worker has keys that are worth nothing at others, and a key that a worker has replaced proves nothing
soon after.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from penstock.v1 import common_pb2

PLAN_KEY_BYTES = 32
RENEW_S = 60.0
"""A worker gives a router a new key so often, and believes the one before for as long again."""
_TAG = b"penstock capability v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """What a capability covers."""

    request_id: str
    epoch: int
    namespace: bytes
    """The tenant's."""
    cache_root: bytes
    """Of the request's blocks."""
    prefill: str
    """Address; empty: the worker that decodes computes the prompt."""
    decode: str
    sources: tuple[str, ...]
    """Stores from which the blocks may come."""

    def mac(self, key: bytes) -> bytes:
        """32 bytes that only who has the key can produce."""
        covered = [_TAG]
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value if isinstance(value, tuple) else (value,)
            covered.append(len(parts).to_bytes(4, "little"))
            for part in parts:
                data = part if isinstance(part, bytes) else str(part).encode()
                covered += (len(data).to_bytes(4, "little"), data)
        return hmac.digest(key, b"".join(covered), "sha256")


def plan_terms(request: common_pb2.Request, capability: common_pb2.Capability) -> PlanTerms:
    """What a worker is asked for."""
    return PlanTerms(
        request_id=request.request_id,
        epoch=capability.epoch,
        namespace=request.namespace,
        cache_root=request.cache_root,
        prefill=capability.prefill,
        decode=capability.decode,
        sources=tuple(request.sources),
    )


class _GivenKey:
    """What a worker knows of a key that it has given a router."""

    def __init__(self) -> None:
        self.replaced_at: float | None = None
        """None: it was not."""
        self.shown: set[bytes] = set()
        """The proofs under it that have been used."""

    def counts(self, now: float) -> bool:
        """Whether it still proves anything."""
        return self.replaced_at is None or now - self.replaced_at < RENEW_S


class PlanKeys:
    """The keys that one worker has given its routers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[bytes, _GivenKey] = {}

    @contextmanager
    def of_stream(self) -> Iterator[Callable[[], bytes]]:
        """Gives keys for one stream to a router, for the length of the block: each replaces that before it."""
        last = b""

        def renew() -> bytes:
            nonlocal last
            self._replaced(last)
            last = os.urandom(PLAN_KEY_BYTES)
            self._live[last] = _GivenKey()
            return last

        try:
            yield renew
        finally:
            self._replaced(last)

    def _replaced(self, key: bytes) -> None:
        now = self._clock()
        if key:
            self._live[key].replaced_at = now
        self._live = {key: given for key, given in self._live.items() if given.counts(now)}

    def prove(self, terms: PlanTerms, mac: bytes) -> bool:
        """Whether a router of this worker has made a plan with these terms, lately. True once for each."""
        now = self._clock()
        for key, given in self._live.items():
            if given.counts(now) and hmac.compare_digest(terms.mac(key), mac):
                fresh = mac not in given.shown
                given.shown.add(mac)
                return fresh
        return False
