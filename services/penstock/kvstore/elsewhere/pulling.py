"""Blocks from other stores of the mesh, for one lease."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from penstock.kv.identity import KEY_BYTES, NAMESPACE_BYTES
from penstock.kv.spec import KvSpec
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.transport.base import Offered, Transport, TransportFault
from penstock.kvstore.table.blocks import Block, ReserveState, TierKind, Wanted
from penstock.kvstore.tiers.base import Room, Wish

MOST_SOURCES = 4
"""Asked for one lease."""


@dataclass(slots=True)
class PullStats:
    """Counters since the start, in addition to those of the transports."""

    refused_sources: int = 0
    """Addresses in requests that do not belong to stores of this mesh."""
    homes_asked: int = 0
    homes_knew: int = 0
    """Answers of homes that named a store."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The ways to blocks of other stores, which all pulls share."""

    neighbours: Neighbours
    transport: Transport
    """To neighbours."""
    pools: Sequence[Transport]
    """To what stores of several hosts share; asked for the blocks that no neighbour has."""
    stats: PullStats


class RemoteBlocks:
    """Supplier of other stores' blocks. Asks each source once, and a key's home when the request names no source. It
    equals another that asks the same."""

    kind = TierKind.REMOTE

    def __init__(self, ways: Ways, spec: KvSpec, wish: Wish) -> None:
        """Sources that are no stores of this mesh are ignored, and counted."""
        self._ways = ways
        self._spec = spec
        self._wish = wish
        self._sources = ways.neighbours.usable(wish.sources)[:MOST_SOURCES]
        self._asks_home = not wish.sources
        self._dry: set[bytes] = set()
        """Keys that no store could bring."""
        ways.stats.refused_sources += sum(one not in ways.neighbours.others for one in wish.sources)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteBlocks) and self._asks == other._asks

    def __hash__(self) -> int:
        return hash(self._asks)

    @property
    def _asks(self) -> tuple[Hashable, ...]:
        return (*self._sources, self._asks_home, self._wish.namespace)

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Guesses, without a call: all keys when a source, the home or a pool might have the first one, else none."""
        if not keys or keys[0] in self._dry:
            return 0
        neighbours = self._ways.neighbours
        named = neighbours.usable(self._sources)
        asked = self._asks_home and neighbours.might_know(keys[0])
        return len(keys) if named or asked or self._ways.pools else 0

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Fetches from at most four sources, then from the pools; asks the key's home when the request named no source.

        Returns how many leading blocks are stored. The key at which it ended is not tried again for this lease. A
        source that fails is avoided for a while.
        """
        at, transport = 0, self._ways.transport
        for source in (await self._holders(keys[0], until))[:MOST_SOURCES]:
            at += await self._from(transport, source, keys[at:], room, until)
            if at == len(keys):
                return at
        for pool in self._ways.pools:
            at += await self._from(pool, "", keys[at:], room, until)
            if at == len(keys):
                return at
        self._dry.add(keys[at])
        return at

    async def _holders(self, key: bytes, until: float) -> list[str]:
        """The stores that may have a block: the sources of the request, or those that the key's home knows."""
        neighbours, stats = self._ways.neighbours, self._ways.stats
        sources = neighbours.usable(self._sources)
        if sources or not self._asks_home or not neighbours.might_know(key):
            return sources
        stats.homes_asked += 1
        sources = await neighbours.who_has(key, until)
        stats.homes_knew += bool(sources)
        return sources

    async def _from(self, transport: Transport, source: str, keys: Sequence[bytes], room: Room, until: float) -> int:
        landing = _Landing(room, self._wish)
        try:
            await transport.fetch(source, self._spec, keys, landing, until)
        except TransportFault as fault:
            if source and fault.reason != "late":
                self._ways.neighbours.shunned.add(source)
        finally:
            landing.close()
        return landing.leading


def _sound(one: Offered) -> bool:
    """Whether another host's description of a block is possible: the store keeps it, and passes it on."""
    named = len(one.parent) == KEY_BYTES and one.parent != one.key and len(one.namespace) in (0, NAMESPACE_BYTES)
    return named and 0 <= one.seconds < math.inf


class _Landing:
    """Slots of the host tier for the blocks of one fetch."""

    def __init__(self, room: Room, wish: Wish) -> None:
        self.leading = 0
        """Blocks from the first on that are stored now."""
        self.namespace = wish.namespace
        self._room = room
        self._session = wish.session
        self._order: list[bytes] = []
        self._open: dict[bytes, Block] = {}
        self._last = b""

    def room(self, offered: Sequence[Offered]) -> list[memoryview | None]:
        """Reserves a slot for each offered block; None: the block is stored or being written already.

        Ends the list at a block that does not continue the chain, and when host memory is full.
        """
        views: list[memoryview | None] = []
        for one in offered:
            if self._last not in (b"", one.parent) or not _sound(one):
                break  # not the chain that was asked for
            answer = self._room.reserve(
                Wanted(one.key, one.parent, one.first_token, one.seconds, self._session, one.namespace)
            )
            if answer.state is ReserveState.FULL:
                break
            self._last = one.key
            self._order.append(one.key)
            if answer.block is not None:
                self._open[one.key] = answer.block
            views.append(self._room.view(answer.block) if answer.block is not None else None)
        self._count()
        return views

    def landed(self, offered: Offered) -> None:
        """Commits the block's slot, which makes the block findable."""
        self._room.commit(self._open.pop(offered.key), offered.checksum)
        self._count()

    def close(self) -> None:
        """Gives back the slots of those that did not come."""
        for block in self._open.values():
            self._room.give_back(block)
        self._open.clear()

    def _count(self) -> None:
        while self.leading < len(self._order) and self._order[self.leading] not in self._open:
            self.leading += 1
