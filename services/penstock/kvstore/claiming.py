"""The waits of clients for blocks that others compute. See `table.claims`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

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


class ClaimDesk:
    """Where clients claim the blocks that they are about to compute."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, owner: str, number: int, keys: Sequence[bytes], pace: Pace) -> Waited:
        """Waits for those of the leading `keys` that others compute, as long as that is quicker; then claims those of
        the rest that are not stored. When the call is cancelled it claims nothing.

        The clients that wait for one claim go on in the order in which they came, so when it ends without the blocks
        the first claims them, and the next one waits for that. Raises NotFound.
        """
        store, claims = self._store, self._store.claims
        store.host.table.attachments.of(owner)
        claims.withdraw(owner, number)
        since, answer = store.now(), Waited(store.lookup(keys))
        free = answer.found
        missing = pace.later(0.0, free)
        while answer.end is not WaitEnd.LATE and answer.found < len(keys) and not store.closing.is_set():
            rest, came = keys[answer.found :], answer.found - free

            def until(count: int, came: int = came) -> float:
                return since + missing.patience_s(came + count)

            try:
                claim, count = claims.best(owner, rest, until, store.now())
            except LookupError:
                break
            answer.end = await self._wait(claim, rest[count - 1], until(count))
            answer.found += store.lookup(rest)
        store.host.table.attachments.of(owner)  # it may be gone by now, and would never take back its claim
        if answer.found < len(keys) and not store.closing.is_set():
            now = store.now()
            claims.make(owner, number, keys[answer.found :], pace.later(now - since, answer.found), now=now)
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
