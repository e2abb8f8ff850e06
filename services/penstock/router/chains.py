"""The block keys of prompts, so that the next prompt of a conversation need not bring those that it shares."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import NamedTuple, overload

from penstock.kv.identity import MAX_KEYS
from penstock.rpc.bounds import check_count

_SPARE = 64
"""One part of so many is made free when there is no room."""


class Keys(Sequence[bytes]):
    """The first keys of a list that only grows, and which longer ones share: to make one copies nothing."""

    __slots__ = ("_length", "earlier", "shared")

    def __init__(self, keys: list[bytes], length: int | None = None, earlier: int = 0) -> None:
        """`keys` is kept, and nobody else changes it; None: all of them."""
        self.shared = keys
        """The list that these are the first keys of, longer perhaps: to be read, not changed, and no further than the
        length of these."""
        self._length = len(keys) if length is None else length
        self.earlier = earlier
        """So many the prompt before had too, if there was one: whoever has served it may have those."""

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return self.shared[slice(*at.indices(self._length))]
        if -self._length <= at < self._length:
            return self.shared[at if at >= 0 else at + self._length]
        raise IndexError(at)

    def __iter__(self) -> Iterator[bytes]:
        return islice(self.shared, self._length)

    def first(self, length: int) -> Keys:
        """The first so many."""
        return Keys(self.shared, min(length, self._length), self.earlier)

    def and_then(self, more: Sequence[bytes]) -> Keys:
        """These and then `more`."""
        longer = self.shared if len(self.shared) == self._length else self.shared[: self._length]
        longer += more
        return Keys(longer, earlier=self._length)


def plain(keys: Sequence[bytes]) -> Sequence[bytes]:
    """The same keys, perhaps followed by more, which are quicker to read one by one."""
    return keys.shared if isinstance(keys, Keys) else keys


@dataclass(slots=True)
class _KeyList:
    """A list of keys, as far as it is held here."""

    keys: list[bytes]
    chains: int = 0
    """That are its first keys, and known."""


class _Chain(NamedTuple):
    keys: Keys
    before: bytes
    """The last key of the chain that this one continues; it may be forgotten."""
    held: _KeyList
    """`keys` and perhaps more."""


class Chains:
    """Chains by tenant and last key, which names a chain as a whole.

    Of each conversation the latest is kept, and the one before, which others may continue too. At most `most` keys are
    held; when there are more, tenants that have most of them lose the chains that they have not used for longest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, OrderedDict[bytes, _Chain]] = {}
        """Each has some; the one longest unused first."""
        self._counts: Counter[str] = Counter()
        """Keys by tenant: those that chains have in common count once."""
        self._keys = 0

    def __len__(self) -> int:
        """Keys of all chains."""
        return self._keys

    def extend(self, tenant: str, after: bytes, keys: Sequence[bytes]) -> Keys | None:
        """The whole chain that goes on with `keys` after the key `after`, or begins with them when that is empty.

        None when no such chain is known. Raises InvalidRequest for a chain that is too long.
        """
        earlier: _Chain | None = None
        if after:
            chains = self._tenants.get(tenant)
            if chains is None or after not in chains:
                return None
            earlier = chains[after]
            chains.move_to_end(after)
        known = earlier.keys if earlier else Keys([])
        if not keys:
            return known
        check_count("ask.block_keys", range(len(known) + len(keys)), MAX_KEYS)
        whole = known.and_then(keys)
        if earlier and whole.shared is earlier.held.keys:
            held = earlier.held
            self._count(tenant, len(keys))
        else:
            held = _KeyList(whole.shared)
            self._count(tenant, len(whole))
        held.chains += 1
        if earlier and earlier.before:
            self._drop(tenant, earlier.before)
        self._drop(tenant, keys[-1])
        self._tenants.setdefault(tenant, OrderedDict())[keys[-1]] = _Chain(whole, after, held)
        if self._keys > self._most:
            self._make_room()
        return whole

    def known(self, tenant: str, last: bytes) -> Keys | None:
        """The chain that ends with a key, which is not used by that; None: it is not known."""
        chains = self._tenants.get(tenant)
        return chains[last].keys if chains is not None and last in chains else None

    def _make_room(self) -> None:
        """For some more too, so that tenants are seldom compared."""
        most = self._most - self._most // _SPARE
        tenants = [(-count, tenant) for tenant, count in self._counts.items()]
        heapify(tenants)
        while self._keys > most:
            _, tenant = tenants[0]
            self._drop(tenant, next(iter(self._tenants[tenant])))
            if tenant in self._tenants:
                heapreplace(tenants, (-self._counts[tenant], tenant))
            else:
                heappop(tenants)

    def _drop(self, tenant: str, last: bytes) -> None:
        """Forgets a chain, if it is known."""
        chains = self._tenants.get(tenant)
        if chains is None or last not in chains:
            return
        chain = chains.pop(last)
        chain.held.chains -= 1
        if not chain.held.chains:
            self._count(tenant, -len(chain.held.keys))
        if not chains:
            del self._tenants[tenant]

    def _count(self, tenant: str, more: int) -> None:
        self._keys += more
        self._counts[tenant] += more
        if not self._counts[tenant]:
            del self._counts[tenant]
