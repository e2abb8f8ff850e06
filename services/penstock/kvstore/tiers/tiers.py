"""The tiers of one spec as one: it finds blocks, and tells subscribers which come and go.

A tier may join later than the others, and leave before them: the disk is there while the space of the spec in use is
open. The store serves from those that are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from penstock.kv.events import EventHub
from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.tiers.base import Follower, KeepingTier, Tier


class Tiers:
    """Those that are open, the nearest first."""

    def __init__(self, hub: EventHub[TierKind] | None = None) -> None:
        self.hub: EventHub[TierKind] = EventHub(self.places) if hub is None else hub
        """Who listens to changes; of all specs of a store, if it is given."""
        self.kept: list[KeepingTier] = []
        """Those of the tiers that keep blocks of this store."""
        self._open: list[Tier] = []
        self._followers: list[Follower] = []
        self._expected: set[TierKind] = set()
        self._complete = asyncio.Event()
        self._complete.set()

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._open)

    # -- who they are

    @contextmanager
    def joined(self, tier: Tier) -> Iterator[None]:
        """The tier is one of them for the length of the block."""
        self._open = sorted([*self._open, tier], key=lambda one: one.kind)
        try:
            yield
        finally:
            self._open.remove(tier)

    @contextmanager
    def keeping(self, tier: KeepingTier) -> Iterator[None]:
        """As `joined`. Its blocks can be found for the length of the block, so subscribers begin anew at both ends."""
        with self.joined(tier):
            self.kept = sorted([*self.kept, tier], key=lambda one: one.kind)
            self.hub.restart()
            try:
                yield
            finally:
                self.kept.remove(tier)
                self.hub.restart()

    @contextmanager
    def followed_by(self, follower: Follower) -> Iterator[None]:
        """The follower goes over to another spec with the store, for the length of the block."""
        self._followers.append(follower)
        try:
            yield
        finally:
            self._followers.remove(follower)

    def figures(self, kind: TierKind) -> Mapping[str, int | float]:
        """The figures of one tier; empty while it is not there."""
        return next((tier.figures() for tier in self._open if tier.kind is kind), {})

    # -- changes of the spec

    @property
    def busy(self) -> bool:
        """Whether one of them can't go over to another spec now."""
        return any(follower.busy for follower in self._followers)

    def format_for(self, spec: KvSpec) -> None:
        """Has all go over to another spec. Not while they are `busy`."""
        for follower in self._followers:
            follower.format_for(spec)
        self.hub.restart()

    def expect(self, kind: TierKind) -> None:
        """A tier is on its way, until `expect_no_more`."""
        self._expected.add(kind)
        self._complete.clear()

    def expect_no_more(self, kind: TierKind) -> None:
        """The tier has joined, or will not come for now."""
        self._expected.discard(kind)
        if not self._expected:
            self._complete.set()

    async def settled(self, limit_s: float | None = None) -> None:
        """Returns when no tier is on its way any more, at the latest after `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._complete.wait()

    # -- what they have

    def nearest(self, key: bytes) -> TierKind | None:
        """The nearest tier that has a block."""
        for tier in self.kept:  # asked for every block that comes or goes
            if tier.find_block(key) is not None:
                return tier.kind
        return None

    def find(self, key: bytes) -> tuple[TierKind, Block] | None:
        """Finds a block, and the nearest tier that has it."""
        found = ((tier.kind, tier.find_block(key)) for tier in self.kept)
        return next(((kind, block) for kind, block in found if block is not None), None)

    def keys(self) -> Iterable[bytes]:
        """All that can be found, each once."""
        return dict.fromkeys(key for tier in self.kept for key in tier.stored_keys())

    def places(self) -> Iterable[tuple[bytes, TierKind]]:
        """All findable blocks and their tiers; blocks that come or go between two steps are left to the changes."""
        for tier, keys in [(tier, list(tier.stored_keys())) for tier in self.kept]:
            yield from ((key, tier.kind) for key in keys if self.nearest(key) is tier.kind)

    def moved(self, kind: TierKind, key: bytes) -> None:
        """Tells subscribers that a block came to the tier or left it, unless a nearer tier has the block anyway."""
        nearest = self.nearest(key)
        if nearest is None or nearest >= kind:
            self.hub.note(key, nearest)
