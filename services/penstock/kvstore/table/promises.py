"""Promises to keep blocks: for how long, for whom, and how many are possible.

Pure: no clock, no block, no bytes. One table per tier, since each tier has its own room. A promise is made for keys,
stored or not yet: blocks of a prompt arrive while their promise is asked for. The holder of the blocks asks `until`.

A tier promises at most `blocks` in all and at most `tenant_blocks` to one tenant, first come, first served. And no
tenant gets more than it leaves free for others (dynamic thresholds, as switches share their buffers: Choudhury
and Hahne, 1998): one alone gets half at most, a second half of the rest, and later ones still find some room.

A promise is never shortened. A hit renews it: the block is kept for as long again as was promised. No tenant
can renew or prolong a promise to another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.kvstore.table.clock import Deadlines


@dataclass(frozen=True, slots=True)
class Grant:
    """A promise of the first `blocks` of the keys that were asked for, for at least `seconds`."""

    seconds: float = 0.0
    blocks: int = 0


@dataclass(slots=True, eq=False)
class _Promise:
    namespace: bytes
    seconds: float
    until: float


class Promises:
    """All promises of one tier. Times are seconds of any clock that does not go back."""

    def __init__(self, blocks: int, tenant_blocks: int, longest_s: float) -> None:
        """`longest_s` is the longest promise; a longer wish gets that."""
        self._most = blocks
        self._tenant_most = min(blocks, tenant_blocks)
        self._longest_s = longest_s
        self._promises: dict[bytes, _Promise] = {}
        self._counts: dict[bytes, int] = {}
        self._ends: Deadlines[tuple[bytes, _Promise]] = Deadlines()

    def __len__(self) -> int:
        """Blocks that are promised."""
        return len(self._promises)

    def of(self, namespace: bytes) -> int:
        """Blocks that are promised to one tenant."""
        return self._counts.get(namespace, 0)

    def grant(self, namespace: bytes, keys: Sequence[bytes], seconds: float, now: float) -> Grant:
        """Promises the leading `keys` that there is room for; an empty Grant when not even the first fits."""
        self.expire(now)
        seconds = min(seconds, self._longest_s)
        if seconds <= 0:
            return Grant()
        granted = 0
        for key in keys:
            if not self._promise(namespace, key, seconds, now):
                break
            granted += 1
        return Grant(seconds, granted) if granted else Grant()

    def _promise(self, namespace: bytes, key: bytes, seconds: float, now: float) -> bool:
        promise = self._promises.get(key)
        if promise is not None:
            if promise.namespace != namespace:
                return False
            promise.seconds = max(promise.seconds, seconds)
            promise.until = max(promise.until, now + seconds)
            return True
        count = self.of(namespace)
        if count >= min(self._tenant_most, self._most - len(self._promises)):
            return False
        promise = self._promises[key] = _Promise(namespace, seconds, now + seconds)
        self._counts[namespace] = count + 1
        self._ends.add(promise.until, (key, promise))
        return True

    def refresh(self, keys: Iterable[bytes], now: float) -> None:
        """These blocks were used: renews their promises."""
        self.expire(now)
        for key in keys:
            promise = self._promises.get(key)
            if promise is not None:
                promise.until = max(promise.until, now + promise.seconds)

    def until(self, key: bytes) -> float:
        """How long the block is promised, as of the last call with a time; 0: it is not."""
        promise = self._promises.get(key)
        return promise.until if promise is not None else 0.0

    def expire(self, now: float) -> None:
        """Forgets promises that are over."""
        for key, promise in self._ends.due(now):
            if promise.until > now:  # renewed since
                self._ends.add(promise.until, (key, promise))
                continue
            del self._promises[key]
            left = self._counts[promise.namespace] - 1
            if left:
                self._counts[promise.namespace] = left
            else:
                del self._counts[promise.namespace]
