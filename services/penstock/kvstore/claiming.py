"""The waits of clients for blocks that others compute. See `table.claims`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from penstock.kv.pace import Pace
from penstock.kvstore.store import Store
from penstock.kvstore.table.claims import Claim


class WaitEnd(Enum):
    """How the last wait of a client ended."""

    NONE = auto()
    """It did not wait."""
    STORED = auto()
    """With the blocks."""
    LEFT = auto()
    """Nobody computes them any more."""
    LATE = auto()
    """The client would have computed them by now."""


@dataclass(slots=True)
class Waited:
    """The answer to a client that claims blocks."""

    found: int = 0
    """Leading blocks that are stored now."""
    end: WaitEnd = WaitEnd.NONE


class OtherHosts(Protocol):
    """The stores of other hosts."""

    async def wait(self, sources: Sequence[str], keys: Sequence[bytes], pace: Pace, within_s: float) -> Waited:
        """Waits for blocks that a client of one of these stores computes, for about `within_s` at most; `found` are
        those that the store has then. NONE: none of the stores waits for anything."""
        ...


class ClaimDesk:
    """Where clients claim the blocks that they are about to compute."""

    def __init__(self, store: Store, others: OtherHosts) -> None:
        self._store = store
        self._others = others

    async def claim(
        self, owner: str, number: int, keys: Sequence[bytes], pace: Pace, *, sources: Sequence[str] = ()
    ) -> Waited:
        """Waits for those of the leading `keys` that others compute, as long as that is quicker; then claims those of
        the rest that are not stored. When the call is cancelled it claims nothing.

        When nobody here computes the next block, the stores of other hosts in `sources` are asked, once. The clients
        that wait for one claim go on in the order in which they came, so when it ends without the blocks the first
        claims them, and the next one waits for that. Raises NotFound.
        """
        store, claims = self._store, self._store.claims
        store.host.table.attachments.of(owner)
        claims.withdraw(owner, number)
        since = store.now()
        answer = await self._follow(owner, keys, pace, sources)
        store.host.table.attachments.of(owner)  # it may be gone by now, and would never take back its claim
        if answer.found < len(keys) and not store.closing.is_set():
            now, rest = store.now(), keys[answer.found :]
            stored = {key for key in rest if store.tiers.nearest(key) is not None and store.lookup([key])}
            claims.make(owner, number, rest, pace.later(now - since, answer.found), now=now, stored=stored)
        return answer

    async def wait(self, keys: Sequence[bytes], pace: Pace) -> Waited:
        """As `claim` for a client of another store, which claims nothing here."""
        return await self._follow("", keys, pace, ())

    async def _follow(self, owner: str, keys: Sequence[bytes], pace: Pace, sources: Sequence[str]) -> Waited:
        """Waits until nobody else computes the next block, or not soon enough."""
        store = self._store
        since, answer = store.now(), Waited(store.lookup(keys))
        free = answer.found
        missing = pace.later(0.0, free)
        while answer.end is not WaitEnd.LATE and answer.found < len(keys) and not store.closing.is_set():
            rest, came, now = keys[answer.found :], answer.found - free, store.now()

            def until(count: int, came: int = came) -> float:
                return since + missing.patience_s(came + count)

            try:
                claim, count = store.claims.best(owner, rest, until, now)
            except LookupError:
                if not sources:
                    break
                asked, sources = sources, ()
                there = await self._others.wait(
                    asked, rest, pace.later(now - since, answer.found), until(len(rest)) - now
                )
                if there.end is not WaitEnd.NONE:
                    answer.end = there.end
                    answer.found += max(there.found, store.lookup(rest))
                continue
            answer.end = await self._wait(claim, rest[count - 1], until(count))
            answer.found += store.lookup(rest)
        return answer

    async def _wait(self, claim: Claim, key: bytes, until: float) -> WaitEnd:
        woken = asyncio.Event()
        told = woken.set
        claim.wait(key, told)
        try:
            async with asyncio.timeout(max(0.0, until - self._store.now())):
                await woken.wait()
        except TimeoutError:
            return WaitEnd.LATE
        finally:
            claim.leave(told)
        return WaitEnd.LEFT if key in claim.left else WaitEnd.STORED
