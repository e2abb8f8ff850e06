"""Claims: blocks that clients say they compute, so that others wait for them instead of computing them too.

Pure: no clock, no bytes, no waiting. A claim is a hint. It ends when its last block is stored, when its client takes it
back or is gone, and when it is long overdue. Several clients may claim a block: each decides for itself whether it
waits. A client may claim as many blocks as `most_keys`; its oldest claims go for newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from penstock.kv.identity import MAX_KEYS
from penstock.kv.pace import LONGEST_WAIT_S, Pace
from penstock.kvstore.table.blocks import Block
from penstock.kvstore.table.clock import Deadlines

_LATE = 2.0
"""A claim ends after this many times the seconds in which it should have been over, and `_LEAST_S` more."""
_LEAST_S = 1.0
_LONGEST_S = 2 * LONGEST_WAIT_S

Told = Callable[[], None]


@dataclass(eq=False, slots=True)
class Claim:
    """Blocks that one client computes."""

    owner: str
    """The client's attachment."""
    number: int
    """The client's own name of it."""
    left: dict[bytes, int]
    """The blocks that are not stored yet, by their place in the claim; all of them once it is over."""
    blocks: int
    """As many as it was made for."""
    pace: Pace
    made: float
    waiting: list[tuple[bytes, Told]] = field(default_factory=list)
    """Who waits for which block, the first to come first."""
    over: bool = False

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys it still promises."""
        for count, key in enumerate(keys):
            if key not in self.left:
                return count
        return len(keys)

    def expected(self, key: bytes, now: float) -> float:
        """When one of its blocks is expected; one that is late is expected to be late as long again."""
        at = self.made + self.pace.ready_s(self.left[key] + 1, self.blocks)
        return max(at, 2 * now - at)

    def wait(self, key: bytes, told: Told) -> None:
        """`told` is called once: when the block is stored, or the claim is over. The claim is not over yet."""
        self.waiting.append((key, told))

    def leave(self, told: Told) -> None:
        """Who waited waits no more."""
        self.waiting = [one for one in self.waiting if one[1] is not told]


class Claims:
    """All claims of one store. Times are seconds of any clock that does not go back. A BlockWatcher."""

    def __init__(self, most_keys: int = MAX_KEYS) -> None:
        self._most = most_keys
        self._of: dict[str, dict[int, Claim]] = {}
        """By attachment, the oldest first."""
        self._by_key: dict[bytes, list[Claim]] = {}
        """The oldest first."""
        self._ends: Deadlines[Claim] = Deadlines()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def knows(self, keys: Sequence[bytes]) -> bool:
        """Whether somebody claims the first of the keys."""
        return bool(keys) and keys[0] in self._by_key

    @property
    def blocks(self) -> int:
        """Blocks that somebody has claimed."""
        return len(self._by_key)

    @property
    def waiting(self) -> int:
        """Waits for claims."""
        return sum(len(claim.waiting) for mine in self._of.values() for claim in mine.values())

    def make(
        self, owner: str, number: int, keys: Sequence[bytes], pace: Pace, *, now: float, stored: Container[bytes] = ()
    ) -> Claim:
        """Claims blocks but for those that are `stored`, which the first is not. They lie behind a gap and are computed
        as well, so they have their place. Another claim of the same number is over."""
        self.withdraw(owner, number)
        self.expire(now)
        keys = keys[: self._most]
        left = {key: place for place, key in enumerate(keys) if key not in stored}
        claim = Claim(owner, number, left, len(keys), pace, now)
        mine = self._of.setdefault(owner, {})
        mine[number] = claim
        for key in claim.left:
            self._by_key.setdefault(key, []).append(claim)
        self._ends.add(now + min(_LONGEST_S, _LATE * pace.seconds(len(keys)) + _LEAST_S), claim)
        held = sum(len(one.left) for one in mine.values())
        for oldest in list(mine.values()):
            if held > self._most:
                held -= len(oldest.left)
                self._end(oldest)
        return claim

    def best(self, owner: str, keys: Sequence[bytes], until: Callable[[int], float], now: float) -> tuple[Claim, int]:
        """The claim of another client that is worth waiting for, and how many of the leading `keys` it covers: of those
        whose first `n` of the keys are expected by `until(n)` the one that covers most, else the one that is expected
        first. Raises LookupError when there is none."""
        self.expire(now)
        found: tuple[int, float, Claim] | None = None
        for claim in self._by_key.get(keys[0], ()) if keys else ():
            if claim.owner == owner:
                continue
            count = claim.leading(keys)
            at = claim.expected(keys[count - 1], now)
            if at > until(count):
                continue
            if found is None or (count, -at) > (found[0], -found[1]):
                found = count, at, claim
        if found is None:
            raise LookupError("nobody computes the next block soon")
        return found[2], found[0]

    def withdraw(self, owner: str, number: int) -> None:
        """The client will not store the rest; a claim that is over may be withdrawn too."""
        claim = self._of.get(owner, {}).get(number)
        if claim is not None:
            self._end(claim)

    def leave(self, owner: str) -> None:
        """The client is gone."""
        for claim in list(self._of.get(owner, {}).values()):
            self._end(claim)

    def close(self) -> None:
        """Ends all claims."""
        for owner in list(self._of):
            self.leave(owner)

    def expire(self, now: float) -> None:
        """Ends the claims that are long overdue."""
        for claim in self._ends.due(now):
            self._end(claim)

    def block_stored(self, block: Block) -> None:
        """Nobody has to wait for the block any more."""
        key = block.key
        for claim in self._by_key.pop(key, ()):
            del claim.left[key]
            told = [one for wanted, one in claim.waiting if wanted == key]
            claim.waiting = [one for one in claim.waiting if one[0] != key]
            if not claim.left:
                self._end(claim)
            for one in told:
                one()

    def block_removed(self, block: Block) -> None:
        """A claim is about blocks that are not stored."""

    def _end(self, claim: Claim) -> None:
        if claim.over:
            return
        claim.over = True
        mine = self._of[claim.owner]
        del mine[claim.number]
        if not mine:
            del self._of[claim.owner]
        for key in claim.left:
            others = self._by_key[key]
            others.remove(claim)
            if not others:
                del self._by_key[key]
        waiting, claim.waiting = claim.waiting, []
        for _, told in waiting:
            told()
