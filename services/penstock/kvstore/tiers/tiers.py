"""The tiers of one store as one: it finds blocks, and tells subscribers which come and go."""

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
        """Finds a block, and the nearest tier that has it."""
        found = ((tier.kind, tier.find_block(key)) for tier in self._open)
        return next(((kind, block) for kind, block in found if block is not None), None)

    def keys(self) -> Iterable[bytes]:
        """All that can be found, each once."""
        return dict.fromkeys(key for tier in self._open for key in tier.stored_keys())

    def _places(self) -> Iterable[tuple[bytes, TierKind]]:
        """All findable blocks and their tiers; blocks that come or go between two steps are left to the changes."""
        for tier, keys in [(tier, list(tier.stored_keys())) for tier in self._open]:
            yield from ((key, tier.kind) for key in keys if self.nearest(key) is tier.kind)

    def moved(self, kind: TierKind, key: bytes) -> None:
        """Tells subscribers that a block came to the tier or left it, unless a nearer tier has the block anyway."""
        nearest = self.nearest(key)
        if nearest is None or nearest >= kind:
            self.hub.note(key, nearest)
