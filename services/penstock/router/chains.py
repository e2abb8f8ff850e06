"""The block keys of prompts, so that the next prompt of a conversation need not bring those that it shares."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, overload

from penstock.kv.identity import MAX_KEYS
from penstock.rpc.bounds import check_count


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


class _Chain(NamedTuple):
    keys: Keys
    before: bytes
    """The last key of the chain that this one continues; it may be forgotten."""


_NOTHING = _Chain(Keys([]), b"")


class Chains:
    """Chains by tenant and last key, which names a chain as a whole.

    Of each conversation the latest is kept, and the one before, which others may continue too. At most `most` keys are
    held, and at most half of them for one tenant; the chain longest unused goes first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._chains: OrderedDict[tuple[str, bytes], _Chain] = OrderedDict()
        self._by_tenant: Counter[str] = Counter()
        self._keys = 0

    def __len__(self) -> int:
        """Keys of all chains."""
        return self._keys

    def extend(self, tenant: str, after: bytes, keys: Sequence[bytes]) -> Keys | None:
        """The whole chain that goes on with `keys` after the key `after`, or begins with them when that is empty.

        None when no such chain is known. Raises InvalidRequest for a chain that is too long.
        """
        earlier = _NOTHING
        if after:
            found = self._chains.get((tenant, after))
            if found is None:
                return None
            self._chains.move_to_end((tenant, after))
            earlier = found
        if not keys:
            return earlier.keys
        check_count("ask.block_keys", range(len(earlier.keys) + len(keys)), MAX_KEYS)
        whole = earlier.keys.and_then(keys) if after else Keys(list(keys))
        if earlier.before:
            self._drop(tenant, earlier.before)
        self._drop(tenant, keys[-1])
        self._chains[tenant, keys[-1]] = _Chain(whole, after)
        self._count(tenant, len(whole))
        while self._by_tenant[tenant] > self._most // 2:
            self._drop(*next(name for name in self._chains if name[0] == tenant))
        while self._keys > self._most:
            self._drop(*next(iter(self._chains)))
        return whole

    def _drop(self, tenant: str, last: bytes) -> None:
        chain = self._chains.pop((tenant, last), None)
        if chain is not None:
            self._count(tenant, -len(chain.keys))

    def _count(self, tenant: str, more: int) -> None:
        self._keys += more
        self._by_tenant[tenant] += more
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
