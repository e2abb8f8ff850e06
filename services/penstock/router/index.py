"""Maps each block key to a bit mask of the members that hold the block: stores, and workers in their own pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from penstock.router.chains import Keys, plain

_SWEEP = 512
"""Entries tidied per call after a member has left; keeps every call short."""
_REFRESHED = 32
"""Keys of a prompt that serving it refreshes, drawn at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStats:
    """Figures of the index."""

    blocks: int
    holders: int
    forgotten: int
    """Dropped because the index was full; their holders may still have them."""
    lookups: int
    keys_found: int


class BlockIndex:
    """At most `max_blocks` keys. What it does not know is computed again; what it knows wrongly is not found there
    and computed again: it is a hint, so a key that was not used for long may be forgotten at any time.

    Every call is short: none looks at all keys, whoever leaves, and a look at a prompt reads few of its keys.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max = max_blocks
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._dead = 0
        """Bits of those that have left, as long as entries may have them."""
        self._to_sweep = 0
        """Entries to look at, from the oldest on, until none has a dead bit."""
        self._forgotten = self._lookups = self._found = 0
        self._random = Random(0)
        self.version = 0
        """Changes when a bit gets another owner."""

    def __len__(self) -> int:
        return len(self._masks)

    def stored(self, holder: str, keys: Iterable[bytes]) -> None:
        """`holder` now holds `keys`."""
        self._sweep()
        bit = self._bit(holder)
        masks = self._masks
        for key in keys:
            masks[key] = masks.get(key, 0) | bit
        while len(masks) > self._max:
            masks.popitem(last=False)
            self._forgotten += 1

    def removed(self, holder: str, keys: Iterable[bytes]) -> None:
        """`holder` no longer holds `keys`."""
        self._sweep()
        bit = self._bits.get(holder, 0)
        for key in keys:
            mask = self._masks.get(key, 0) & ~bit
            if mask:
                self._masks[key] = mask
            else:
                self._masks.pop(key, None)

    def drop(self, holder: str) -> None:
        """`holder` has left or begins again: its blocks are not found from now on. Its entries go later, bit by bit."""
        bit = self._bits.pop(holder, 0)
        if bit:
            del self._names[bit]
            self.version += 1
            self._dead |= bit
            self._to_sweep = len(self._masks)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """For each member that holds the first key, how many leading keys it holds.

        A key names all keys before it, and members give up blocks from the end of a chain. So this looks for the end
        of each member's part by halving: a member that lost one in the middle seems to hold what is behind it too.
        """
        return {holder: depth for depth, mask in self.ends(keys) for holder in self.holders(mask)}

    def ends(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """The depths that `match` finds, ascending, each with the bits of the members that end there."""
        self._lookups += 1
        found = list(self._ends(keys))
        self._found += found[-1][0] if found else 0
        return found

    def deepest(self, keys: Sequence[bytes]) -> int:
        """How many leading keys some member has; for people, so it counts as no lookup."""
        return max((depth for depth, _ in self._ends(keys)), default=0)

    def used(self, keys: Sequence[bytes]) -> None:
        """A prompt with these keys was served: some of them become the last to be forgotten, the first one last of
        all."""
        if 2 * len(self._masks) <= self._max:
            return
        masks, alive = self._masks, ~self._dead
        begin = self._random.randrange(len(keys)) if len(keys) > _REFRESHED else 0
        for key in (*reversed(keys[begin : begin + _REFRESHED]), *keys[:1]):
            if not self._dead:
                if key in masks:
                    masks.move_to_end(key)
            elif mask := masks.pop(key, 0) & alive:
                masks[key] = mask

    def holders(self, mask: int) -> Iterator[str]:
        """The members that have these bits."""
        while mask:
            bit = mask & -mask
            yield self._names[bit]
            mask ^= bit

    def bits(self) -> Iterator[tuple[int, str]]:
        """The number of each member's bit."""
        return ((bit.bit_length() - 1, holder) for bit, holder in self._names.items())

    def stats(self) -> IndexStats:
        """Figures for metrics and tests."""
        return IndexStats(
            blocks=len(self._masks),
            holders=len(self._bits),
            forgotten=self._forgotten,
            lookups=self._lookups,
            keys_found=self._found,
        )

    def _ends(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        masks, depth, count, likely = self._masks, 0, len(keys), 0
        if isinstance(keys, Keys):
            likely = min(keys.earlier, count)
        keys = plain(keys)
        alive = masks.get(keys[0], 0) & ~self._dead if count else 0
        while alive:
            low, high = depth, count  # all hold what is before `low`; not all hold key `high`, if there is one
            step = 1
            if low < likely:
                if alive & ~masks.get(keys[likely - 1], 0):
                    high = likely - 1
                else:
                    low = likely
            while low < high:  # from the near end in growing steps, then by halves
                at = min(low + step, high) - 1
                if alive & ~masks.get(keys[at], 0):
                    high = at
                    break
                low, step = at + 1, 4 * step
            while low < high:
                at = (low + high) // 2
                if alive & ~masks.get(keys[at], 0):
                    high = at
                else:
                    low = at + 1
            depth = low
            left = alive & masks.get(keys[depth], 0) if depth < count else 0
            yield depth, alive & ~left
            alive = left

    def _bit(self, holder: str) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            taken = self._dead
            for other in self._bits.values():
                taken |= other
            bit = self._bits[holder] = ~taken & (taken + 1)  # the lowest free bit
            self._names[bit] = holder
            self.version += 1
        return bit

    def _sweep(self) -> None:
        """Looks at some of the oldest entries, which become the newest: after all of them their order is the same."""
        if not self._dead:
            return
        for _ in range(min(_SWEEP, self._to_sweep, len(self._masks))):  # events have taken some away
            key, mask = self._masks.popitem(last=False)
            if mask & ~self._dead:
                self._masks[key] = mask & ~self._dead
        self._to_sweep = max(0, self._to_sweep - _SWEEP)
        if not self._to_sweep:
            self._dead = 0
