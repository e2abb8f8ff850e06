"""The home of a key: the one store that keeps the addresses of its holders.

Data stays where it was made. The home knows only the address, and is asked when the router does not know it: because
it has forgotten, restarts, or does not exist. All stores with the same list of stores find the same home (rendezvous
hashing), and when a store joins or leaves only the keys that it gains or had change theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

import xxhash

_HOLDERS = 4
"""Remembered for one key, the latest first."""


def home(key: bytes, members: Iterable[str]) -> str:
    """The member that is told of `key`; `members` are addresses, in any order. Raises ValueError when there is none."""
    return max(members, key=lambda member: (xxhash.xxh3_64_intdigest(member.encode() + b"\0" + key), member))


def by_home(keys: Iterable[bytes], members: Sequence[str]) -> dict[str, list[bytes]]:
    """The keys of each home."""
    homes: dict[str, list[bytes]] = {}
    for key in keys:
        homes.setdefault(home(key, members), []).append(key)
    return homes


class Directory:
    """The stores that announced each key. It forgets the keys announced longest ago. A hint, never a promise."""

    def __init__(self, max_keys: int) -> None:
        self._max = max_keys
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, holder: str, keys: Iterable[bytes]) -> None:
        """`holder` says that it has `keys`."""
        for key in keys:
            others = [other for other in self._holders.get(key, ()) if other != holder]
            self._holders[key] = (holder, *others[: _HOLDERS - 1])
            self._holders.move_to_end(key)
        while len(self._holders) > self._max:
            self._holders.popitem(last=False)

    def removed(self, holder: str, keys: Iterable[bytes]) -> None:
        """`holder` has them no more."""
        for key in keys:
            left = tuple(other for other in self._holders.get(key, ()) if other != holder)
            if left:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    def holders(self, key: bytes, among: Container[str]) -> list[str]:
        """The stores that announced the key and are still `among` the members."""
        return [holder for holder in self._holders.get(key, ()) if holder in among]
