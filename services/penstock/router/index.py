"""Maps each block key to a bit mask of the members that hold the block: stores, and workers in their own pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

_SWEEP = 512
"""Entries tidied per call after a member has left; keeps every call short."""


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
    and computed again: it is a hint, so the key longest unused may be forgotten at any time."""

    def __init__(self, max_blocks: int) -> None:
        self._max = max_blocks
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._dead = 0
        self._to_sweep: list[bytes] = []
        self._forgotten = self._lookups = self._found = 0

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
            self._dead |= bit
            self._to_sweep = list(self._masks)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """For each member that holds the first key, how many leading keys it holds without a gap."""
        self._lookups += 1
        alive = 0
        for bit in self._bits.values():
            alive |= bit
        depths: dict[int, int] = {}
        depth = 0
        masks = map(self._masks.get, keys, repeat(0))
        for mask, run in groupby(masks):
            held = alive & mask
            if held != alive:
                if depth:
                    depths[alive & ~held] = depth
                alive = held
                if not alive:
                    break
            depth += len(list(run))
        if alive and depth:
            depths[alive] = depth
        self._found += depth
        if 2 * len(self._masks) > self._max:
            self._refresh(keys[:depth])
        return {holder: depth for holder, bit in self._bits.items() for mask, depth in depths.items() if mask & bit}

    def stats(self) -> IndexStats:
        """Figures for metrics and tests."""
        return IndexStats(
            blocks=len(self._masks),
            holders=len(self._bits),
            forgotten=self._forgotten,
            lookups=self._lookups,
            keys_found=self._found,
        )

    def _bit(self, holder: str) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            taken = self._dead
            for other in self._bits.values():
                taken |= other
            bit = self._bits[holder] = ~taken & (taken + 1)  # the lowest free bit
        return bit

    def _refresh(self, keys: Sequence[bytes]) -> None:
        """Makes `keys` the last to be forgotten, the first block of the chain last of all."""
        for key in reversed(keys):
            self._masks.move_to_end(key)

    def _sweep(self) -> None:
        if not self._dead:
            return
        for key in self._to_sweep[-_SWEEP:]:
            mask = self._masks.get(key)
            if mask is not None and not mask & ~self._dead:
                del self._masks[key]
            elif mask is not None:
                self._masks[key] = mask & ~self._dead
        del self._to_sweep[-_SWEEP:]
        if not self._to_sweep:
            self._dead = 0
