"""The tiers of one store as one: where a block is, and who hears of what comes and goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from penstock.kvstore.events.hub import EventHub
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.tiers.base import Tier


class Tiers:
    """Those that are open, the nearest first."""

    def __init__(self) -> None:
        self.hub = EventHub(self._places)
        """Who listens to changes."""
        self._open: list[Tier] = []

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._open)

    @contextmanager
    def joined(self, tier: Tier) -> Iterator[None]:
        """The tier is one of them for the length of the block."""
        self._open = sorted([*self._open, tier], key=lambda one: one.kind)
        try:
            yield
        finally:
            self._open.remove(tier)

    def nearest(self, key: bytes) -> TierKind | None:
        """The nearest tier that has a block."""
        for tier in self._open:  # asked for every block that comes or goes
            if tier.find_block(key) is not None:
                return tier.kind
        return None

    def find(self, key: bytes) -> tuple[TierKind, Block] | None:
        """Where a block is, and what is known of it there."""
        found = ((tier.kind, tier.find_block(key)) for tier in self._open)
        return next(((kind, block) for kind, block in found if block is not None), None)

    def keys(self) -> Iterable[bytes]:
        """All that can be found, each once."""
        return dict.fromkeys(key for tier in self._open for key in tier.stored_keys())

    def _places(self) -> Iterable[tuple[bytes, TierKind]]:
        """All that can be found, and where; what comes and goes between two steps is left to the changes."""
        for tier, keys in [(tier, list(tier.stored_keys())) for tier in self._open]:
            yield from ((key, tier.kind) for key in keys if self.nearest(key) is tier.kind)

    def moved(self, kind: TierKind, key: bytes) -> None:
        """A block came to that tier, or left it: those who listen are told, unless a nearer one has it anyway."""
        nearest = self.nearest(key)
        if nearest is None or nearest >= kind:
            self.hub.note(key, nearest)
