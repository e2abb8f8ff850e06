"""Other stores as a tier: the last that is asked for a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.elsewhere.mooncake import Pool, open_pools
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.pulling import PullStats, RemoteBlocks, Ways
from penstock.kvstore.elsewhere.transport.base import Transport
from penstock.kvstore.elsewhere.transport.over_grpc import open_grpc_transport
from penstock.kvstore.table.blocks import TierKind
from penstock.kvstore.tiers.base import Dropped, Rules, Supplier, Wish
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.tiers import Tiers


class Elsewhere:
    """Tier: the other stores of the mesh, and a pool if there is one. Made by `open_elsewhere`.

    It keeps nothing and promises nothing: what other stores have is known only when they are asked.
    """

    kind = TierKind.REMOTE

    def __init__(self, host: HostTier, neighbours: Neighbours, transport: Transport, pools: Sequence[Pool]) -> None:
        """It brings blocks of the spec of `host`."""
        self.neighbours = neighbours
        self.transport = transport
        self._host = host
        self._pools = pools
        self._stats = PullStats()

    def suppliers(self, wish: Wish) -> Sequence[Supplier]:
        """Returns one for this lease; none when another store asks, or when there is nobody to ask."""
        spec = self._host.spec
        if spec is None or wish.peer or not (self.neighbours.others or self._pools):
            return ()
        ways = Ways(
            neighbours=self.neighbours,
            transport=self.transport,
            pools=[pool.transport for pool in self._pools],
            stats=self._stats,
        )
        return (RemoteBlocks(ways, spec, wish),)

    async def drop_tenant(self, namespace: bytes) -> list[Dropped]:
        """Has all blocks of a tenant leave the pools; neighbours are told by whoever tells this store. Raises
        Unavailable."""
        return [await pool.drop_tenant(namespace) for pool in self._pools]

    def figures(self) -> Mapping[str, int | float]:
        """Returns the numbers of PullStats in the proto."""
        moved = self.transport.stats
        return {
            "pulled_blocks": moved.blocks,
            "pulled_bytes": moved.bytes_in,
            "resumed_bytes": moved.bytes_resumed,
            "pull_seconds": moved.seconds,
            "resumptions": moved.resumptions,
            **asdict(self._stats),
            "pool_blocks": sum(pool.transport.stats.blocks for pool in self._pools),
            "pool_published": sum(pool.published for pool in self._pools),
            "pool_left_out": sum(pool.left_out for pool in self._pools),
        }

    @property
    def faults(self) -> Counter[str]:
        """Fetches that ended early, by reason."""
        ways = (self.transport, *(pool.transport for pool in self._pools))
        return sum((way.stats.faults for way in ways), Counter[str]())


@asynccontextmanager
async def open_elsewhere(
    config: KvStoreConfig, host: HostTier, neighbours: Neighbours, *, tiers: Tiers, rules: Rules
) -> AsyncIterator[Elsewhere]:
    """The other stores, as one of `tiers`. Raises ConfigError.

    Leave it when no block is brought any more, and before host memory.
    """
    name, member = f"store of {config.host_id}", neighbours.channels.member
    async with (
        open_grpc_transport(name, rules.failed, member=member, stall_s=config.stall_s) as transport,
        open_pools(host, config, rules) as pools,
    ):
        elsewhere = Elsewhere(host, neighbours, transport, pools)
        with tiers.joined(elsewhere):
            yield elsewhere
