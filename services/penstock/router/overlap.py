"""Blocks that several live plans have in common on one member, each counted once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from penstock.router.chains import plain


class Overlap:
    """The blocks that plans have computed on one member, or will; by key, with the number of plans that need each."""

    def __init__(self) -> None:
        self._users: Counter[bytes] = Counter()
        self._computed: set[bytes] = set()
        """Those whose KV exists by now."""

    @property
    def missing(self) -> int:
        """Blocks that are still to be computed."""
        return len(self._users) - len(self._computed)

    def add(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """A plan needs these blocks; the caller owes one `remove`. Returns those that no other needed."""
        users, before = self._users, len(self._users)
        users.update(keys)
        return keys if len(users) == before + len(keys) else [key for key in keys if users[key] == 1]

    def compute(self, keys: Iterable[bytes]) -> None:
        """The KV of these blocks, which a plan needs, exists from now on: for others too, as long as any plan does."""
        self._computed.update(keys)

    def remove(self, keys: Iterable[bytes]) -> list[bytes]:
        """The plan has ended. Returns the blocks that nobody needs any more."""
        users, gone = self._users, []
        for key in keys:
            left = users[key] - 1
            if left:
                users[key] = left
            else:
                del users[key]
                self._computed.discard(key)
                gone.append(key)
        return gone

    def run(self, keys: Sequence[bytes], start: int) -> int:
        """How many of `keys` from `start` on some plan needs, up to the first that none does."""
        if not self._users or start >= len(keys) or keys[start] not in self._users:
            return 0
        return sum(1 for _ in takewhile(self._users.__contains__, keys[start:]))


def common(keys: Sequence[bytes], others: Iterable[Sequence[bytes]]) -> int:
    """How many leading `keys` one of the others has too. A key names all before it, so most of the others cost one
    comparison."""
    best, mine, length = 0, plain(keys), len(keys)
    for other in others:
        theirs = plain(other)
        if best < length and best < len(other) and mine[best] == theirs[best]:
            most = min(length, len(other))
            best = bisect_left(range(most), True, best + 1, key=lambda at: mine[at] != theirs[at])
    return best
