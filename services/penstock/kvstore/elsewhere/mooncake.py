"""A Mooncake pool next to the store, which gets a copy of each block that clients store, for stores of other hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from penstock.errors import Unavailable
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.elsewhere.transport.base import Offered, TransportFault
from penstock.kvstore.elsewhere.transport.over_mooncake import (
    MooncakeOptions,
    MooncakeTransport,
    open_mooncake_transport,
)
from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.tiers.base import Dropped, Rules
from penstock.kvstore.tiers.host import HostTier
from penstock.runtime.tasks import beside

_WAITING = 4096
"""Blocks that wait to be put into the pool; more are left out."""
_PUT_S = 5.0
_DROP_S = 10.0


class Pool:
    """Watches the host tier and copies the blocks that clients store. Made by `open_pools`; `run` it."""

    def __init__(self, host: HostTier, transport: MooncakeTransport, now: Callable[[], float]) -> None:
        self.transport = transport
        self.published = 0
        """Blocks put into the pool."""
        self.left_out = 0
        """Blocks for which there was no time or no room."""
        self._host = host
        self._now = now
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(_WAITING)
        self._at_work = asyncio.Lock()
        self._log = structlog.get_logger("penstock.kvstore")

    def block_stored(self, block: Block) -> None:
        """Queues a block that a client stored; counts it as left out when the queue is full.

        A block that the store itself brought is in the pool already, or on a disk that is quicker.
        """
        if not block.owner:
            return
        try:
            self._waiting.put_nowait(block.key)
        except asyncio.QueueFull:
            self.left_out += 1

    def block_removed(self, block: Block) -> None:
        """Does nothing: the pool has an eviction of its own."""

    async def run(self) -> None:
        """Puts blocks into the pool, one after the other, until cancelled."""
        while True:
            key = await self._waiting.get()
            async with self._at_work:
                await self._publish(key)

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        """Has all blocks of a tenant leave the pool; none that this store lacks is put there afterwards. Raises
        Unavailable."""
        async with self._at_work:
            try:
                blocks = await self.transport.drop_tenant(namespace, time.monotonic() + _DROP_S)
            except TransportFault as fault:
                raise Unavailable(f"the Mooncake pool still has blocks of the tenant: {fault}") from fault
        return Dropped(TierKind.REMOTE, blocks, blocks * self._host.table.block_bytes)

    async def _publish(self, key: bytes) -> None:
        table = self._host.table
        block = table.hold(key)
        if block is None:
            return
        offered = Offered(block.key, block.parent, block.first_token, block.checksum, block.seconds, block.namespace)
        view = self._host.view(block)
        try:
            if await self.transport.publish(offered, view, time.monotonic() + _PUT_S):
                self.published += 1
            else:
                self.left_out += 1
        except Exception as error:  # whatever Mooncake raises: the next block may fare better
            self.left_out += 1
            self._log.warning("a block was not put into the pool", reason=repr(error))
        finally:
            view.release()
            table.drop(block, self._now())


@asynccontextmanager
async def open_pools(host: HostTier, config: KvStoreConfig, rules: Rules) -> AsyncIterator[Sequence[Pool]]:
    """The pool of `config`, kept filled; none when none is wanted. Raises ConfigError."""
    if not config.mooncake_master:
        yield ()
        return
    options = MooncakeOptions(
        master=config.mooncake_master,
        host=config.mooncake_host,
        lend_bytes=config.mooncake_lend_bytes,
        any_interface=config.mooncake_any_interface,
    )
    async with open_mooncake_transport(options) as transport:
        pool = Pool(host, transport, rules.now)
        with host.watched_by(pool):
            async with beside(pool.run, name="mooncake pool", on_failure="restart", failed=rules.failed):
                yield (pool,)
