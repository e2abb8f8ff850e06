"""One partition of the store: one KvSpec at a time, the clients that use it, and tiers that it asks in order.

The first client fixes the spec. A client with another one is refused with the difference named, for as long as any
client is attached; `partitions` sends it to another partition, if there is one for it. Two specs could share slots of
equal size, since their keys differ, but then a worker with the wrong weights would look healthy and never hit; a
refusal is seen. When no client is attached, a new spec empties the partition: the readers of the old blocks are gone.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from penstock.errors import Overloaded, Refused, Unavailable
from penstock.kv.bytes.arena import Layout
from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.sessions import SessionPhase, SessionTable
from penstock.kvstore.table.blocks import Block, Lease, TableStats
from penstock.kvstore.table.claims import Claims
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.tiers.base import Rules, Supplier, Wish
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.lent import PagesAt
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.config import format_size

_FRUITLESS = 1000
"""Blocks stored, and blocks missed, without a hit: no workload of turns looks like that."""


class Store:
    """Made by `open_store`; used from its event loop."""

    def __init__(
        self, config: KvStoreConfig, tiers: Tiers, host: HostTier, *, sessions: SessionTable, rules: Rules
    ) -> None:
        self.tiers = tiers
        self.host = host
        self.sessions = sessions
        self.claims = Claims()
        """Blocks that clients compute. `open_store` tells it which are stored."""
        self.now = rules.now
        self.closing = asyncio.Event()
        """Set when attachments are to end."""
        self._config = config
        self._suspected = False
        self._log = structlog.get_logger("penstock.kvstore")

    @property
    def spec(self) -> KvSpec | None:
        """Whose blocks the store holds; None before the first client."""
        return self.host.spec

    def stats(self) -> TableStats:
        """Figures of the host tier."""
        return self.host.table.stats()

    # -- blocks

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored, in whatever tiers; also before the first client."""
        found = 0
        while more := max((tier.has_blocks(keys[found:]) for tier in self.tiers.kept), default=0):
            found += more
        return found

    async def lease(
        self, attachment_id: str, keys: Sequence[bytes], wish: Wish, *, seconds: float, wait_s: float
    ) -> Lease | None:
        """Pins the leading blocks that any tier has, for `seconds`; None when there is none.

        The tiers below bring the missing blocks into host memory, within `wait_s`.
        """
        table, now = self.host.table, self.now()
        suppliers = [supplier for tier in self.tiers for supplier in tier.suppliers(wish)]
        lease = table.leases.take(attachment_id, keys, seconds, now, wish.session, grows=bool(suppliers))
        if lease is not None and suppliers:
            if len(lease.blocks) < len(keys):
                until = now + min(wait_s, self._config.bring_s)
                await self._grow(lease, keys, suppliers, until)
            lease = table.leases.settle(lease, len(keys), self.now())
        self.blocks_used(keys)
        if lease is None:
            self._suspect()
            return None
        self.host.lease_given(lease)
        return lease

    async def _grow(self, lease: Lease, keys: Sequence[bytes], suppliers: Sequence[Supplier], until: float) -> None:
        table = self.host.table
        try:
            await self.host.bringer.fill(lease, keys, suppliers, until)
        except BaseException:
            table.leases.abandon(lease, self.now())
            raise

    def blocks_used(self, keys: Sequence[bytes]) -> None:
        """Renews the promises of blocks that a client asked for, in every tier."""
        for tier in self.tiers.kept:
            tier.renew_promises(keys)

    def touch(self, attachment_id: str, keys: Sequence[bytes], session: str) -> list[bytes]:
        """Counts a use of blocks that a client did not ask for, having copies; returns the keys that no tier has."""
        self.host.table.attachments.of(attachment_id)
        self.host.touch_blocks(keys, session)
        others = [key for key in keys if self.host.find_block(key) is None]
        for tier in self.tiers.kept:
            if others and tier is not self.host:
                tier.touch_blocks(others, session)
        self.blocks_used(keys)
        return [key for key in others if self.tiers.nearest(key) is None]

    def _suspect(self) -> None:
        """Logs once that much is stored and nothing is ever found, as when clients name the same tokens differently."""
        stats = self.stats()
        if not self._suspected and not stats.hits and min(stats.puts, stats.misses) >= _FRUITLESS:
            self._suspected = True
            self._log.warning("many blocks were stored and asked for, and none was ever found: do all clients agree?")

    async def promise(self, attachment_id: str, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Has every tier promise as much as it can; returns the grant of the tier that promised most, when those of the
        blocks that were only lent are copied."""
        self.host.table.attachments.of(attachment_id)
        grants = [tier.promise_blocks(keys, seconds, namespace) for tier in self.tiers.kept]
        best = max(grants, key=lambda grant: grant.blocks)
        await self.host.lent.save(keys[: best.blocks])
        return best

    # -- lent blocks

    def show_pages(self, attachment_id: str, there: PagesAt) -> str:
        """Maps the pages of a client, who may lend blocks in them from now on; why not, empty when it may."""
        self.host.table.attachments.of(attachment_id)
        if self._config.mooncake_master:
            return "the Mooncake pool takes blocks from the store's memory"
        try:
            self.host.lent.open(attachment_id, there, self.host.table.block_bytes)
        except Refused as error:
            return error.message
        return ""

    async def lend(self, attachment_id: str, blocks: Sequence[tuple[Block, int]], ended: Sequence[bytes]) -> None:
        """A client lends blocks, each in the page at an offset, and others no more. Copies those that are promised.
        Raises InvalidRequest, NotFound."""
        self.host.table.attachments.of(attachment_id)
        self.host.lent.end(attachment_id, ended)
        if blocks:
            self.host.lent.lend(attachment_id, blocks)
        now, table = self.now(), self.host.table
        await self.host.lent.save([block.key for block, _ in blocks if table.promised_until(block.key) > now])

    async def save(self, attachment_id: str, keys: Sequence[bytes]) -> int:
        """Copies lent blocks; returns how many are in the arena then."""
        self.host.table.attachments.of(attachment_id)
        return await self.host.lent.save(keys)

    def expect_session(self, session: str) -> None:
        """Passes news of a session to the eviction policies."""
        known = self.sessions.known(session)
        if known is None:
            return
        returns_at = known.expected_at if known.expected_at < math.inf else None
        hint = ReturnHint(ended=known.state is SessionPhase.ENDED, returns_at=returns_at)
        for tier in self.tiers.kept:
            tier.expect_session(session, hint)

    # -- attachments

    def attach(self, client: str, spec: KvSpec, *, peer: bool = False) -> str:
        """A new attachment's id. A `peer` only reads, so the store is never emptied for it.

        Raises Refused, Overloaded, Unavailable.
        """
        if self.closing.is_set():
            raise Unavailable("the store is stopping")
        if self.stats().attachments >= self._config.max_clients:
            raise Overloaded(f"{self._config.max_clients} clients are attached already", retry_after=5.0)
        if spec != self.spec:
            if peer and not (self.spec is None and any(tier.spec == spec for tier in self.tiers.kept)):
                differs = self.spec.difference(spec) if self.spec else "nothing is stored"
                raise Refused(f"there are no blocks of this KV spec here: {differs}")
            self._change_spec(spec)
        attachment_id = secrets.token_hex(16)
        self.host.table.attach(attachment_id, client)
        self._log.info("client attached", client=client)
        return attachment_id

    def detach(self, attachment_id: str, client: str) -> None:
        """Takes back all that the attachment owns."""
        self.host.table.detach(attachment_id, self.now())
        if not self.closing.is_set():  # else the disk takes them from where they are
            self.host.lent.leave(attachment_id)
        self.claims.leave(attachment_id)
        self._log.info("client detached", client=client)

    def _change_spec(self, spec: KvSpec) -> None:
        if not Layout.fit(self.host.arena.size, spec.block_bytes).slots:
            size = format_size(self.host.arena.size)
            raise Refused(f"a block of {format_size(spec.block_bytes)} does not fit into a store of {size}")
        if self.spec is not None and self.stats().attachments:
            raise Refused(f"the store is in use with another KV spec: {self.spec.difference(spec)}")
        if self.tiers.busy:
            raise Unavailable("the store waits for the last readers and writers of another KV spec", retry_after=1.0)
        self.tiers.format_for(spec)

    async def stop(self) -> None:
        """Ends all attachments, subscriptions, claims and bringings; their streams return."""
        self.closing.set()
        self.claims.close()
        self.tiers.hub.close()
        await self.host.bringer.close()


@asynccontextmanager
async def open_store(
    config: KvStoreConfig, tiers: Tiers, host: HostTier, *, sessions: SessionTable, rules: Rules
) -> AsyncIterator[Store]:
    """A store over tiers that are open; `host` is one of them. At the end nothing is brought any more."""
    store = Store(config, tiers, host, sessions=sessions, rules=rules)
    with sessions.heard_by(store.expect_session), host.watched_by(store.claims):
        try:
            yield store
        finally:
            await store.stop()
