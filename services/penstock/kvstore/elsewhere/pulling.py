"""Blocks from other stores of the mesh, for one lease."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.kv.identity import KEY_BYTES, NAMESPACE_BYTES
from penstock.kv.spec import KvSpec
from penstock.kvstore.elsewhere.mooncake import Pool
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.transport.base import Offered, Transport, TransportFault
from penstock.kvstore.table.blocks import Block, ReserveState, TierKind, Wanted
from penstock.kvstore.tiers.base import Room

_MOST_SOURCES = 4
"""Asked for one lease."""


@dataclass
class PullStats:
    """Counters since the start, in addition to those of the transport."""

    refused_sources: int = 0
    """Addresses in requests that do not belong to stores of this mesh."""
    homes_asked: int = 0
    homes_knew: int = 0
    """Answers of homes that named a store."""


class Puller:
    """Makes the suppliers of single leases. One per store."""

    def __init__(self, neighbours: Neighbours, transport: Transport, pool: Pool | None = None) -> None:
        """`pool` is asked for the blocks that no neighbour has."""
        self.neighbours = neighbours
        self.transport = transport
        self.pool = pool
        self.stats = PullStats()

    @property
    def anywhere(self) -> bool:
        """Whether there is another store or a pool to ask."""
        return bool(self.neighbours.others) or self.pool is not None

    def supplier(self, spec: KvSpec, sources: Sequence[str], session: str = "") -> RemoteBlocks:
        """Makes the supplier of a lease whose other blocks may be at `sources`; ignores addresses outside this mesh."""
        self.stats.refused_sources += sum(one not in self.neighbours.others for one in sources)
        return RemoteBlocks(self, spec, self.neighbours.usable(sources)[:_MOST_SOURCES], not sources, session)

    def figures(self) -> dict[str, Any]:
        """Numbers for metrics and the wire, by the names of PullStats there."""
        moved = self.transport.stats
        return {
            "pulled_blocks": moved.blocks,
            "pulled_bytes": moved.bytes_in,
            "resumed_bytes": moved.bytes_resumed,
            "pull_seconds": moved.seconds,
            "resumptions": moved.resumptions,
            **asdict(self.stats),
            "pool_blocks": self.pool.transport.stats.blocks if self.pool else 0,
            "pool_published": self.pool.published if self.pool else 0,
            "pool_left_out": self.pool.left_out if self.pool else 0,
        }

    @property
    def faults(self) -> Counter[str]:
        """Fetches that ended early, by reason."""
        return self.transport.stats.faults + (self.pool.transport.stats.faults if self.pool else Counter())


@dataclass(eq=False)
class RemoteBlocks:
    """Supplier of other stores' blocks. Asks each source once, and a key's home when the request names no source."""

    puller: Puller
    spec: KvSpec
    sources: list[str]
    ask_home: bool
    session: str
    kind: TierKind = TierKind.REMOTE
    _dry: set[bytes] = field(default_factory=set)
    """Keys that no store could bring."""

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Guesses, without a call: all keys when a source, the home or the pool might have the first one, else none."""
        if not keys or keys[0] in self._dry:
            return 0
        neighbours = self.puller.neighbours
        named = neighbours.usable(self.sources)
        asked = self.ask_home and neighbours.might_know(keys[0])
        return len(keys) if named or asked or self.puller.pool else 0

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Fetches from at most four sources, then from the pool; asks the key's home when the request named no source.

        Returns how many leading blocks are stored. The key at which it ended is not tried again for this lease. A
        source that fails is avoided for a while.
        """
        sources = self.puller.neighbours.usable(self.sources)
        if not sources and self.ask_home and self.puller.neighbours.might_know(keys[0]):
            self.puller.stats.homes_asked += 1
            sources = await self.puller.neighbours.who_has(keys[0], until)
            self.puller.stats.homes_knew += bool(sources)
        at = 0
        for source in sources[:_MOST_SOURCES]:
            at += await self._from(self.puller.transport, source, keys[at:], room, until)
            if at == len(keys):
                return at
        if self.puller.pool is not None:
            at += await self._from(self.puller.pool.transport, "", keys[at:], room, until)
            if at == len(keys):
                return at
        self._dry.add(keys[at])
        return at

    async def _from(self, transport: Transport, source: str, keys: Sequence[bytes], room: Room, until: float) -> int:
        landing = _Landing(room, self.session)
        try:
            await transport.fetch(source, self.spec, keys, landing, until)
        except TransportFault as fault:
            if source and fault.reason != "late":
                self.puller.neighbours.shunned.add(source)
        finally:
            landing.close()
        return landing.leading


def _sound(one: Offered) -> bool:
    """Whether another host's description of a block is possible: the store keeps it, and passes it on."""
    named = len(one.parent) == KEY_BYTES and one.parent != one.key and len(one.namespace) in (0, NAMESPACE_BYTES)
    return named and 0 <= one.seconds < math.inf


class _Landing:
    """Slots of the host tier for the blocks of one fetch."""

    def __init__(self, room: Room, session: str) -> None:
        self.leading = 0
        """Blocks from the first on that are stored now."""
        self._room = room
        self._session = session
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
