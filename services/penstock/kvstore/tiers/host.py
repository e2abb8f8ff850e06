"""Host memory: the arena that clients of this host map, and the tier into which all others bring their blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, takewhile

import structlog

from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.table.blocks import Block, BlockUse, Lease, TierKind
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.table.shelf import BlockWatcher
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.alarm import Alarm
from penstock.kvstore.tiers.base import Dropped, Room, Rules, Supplier, Wish
from penstock.kvstore.tiers.bringing import Bringer
from penstock.kvstore.tiers.dropping import drop_tenant
from penstock.kvstore.tiers.lent import LentBlocks
from penstock.kvstore.tiers.tiers import Tiers
from penstock.runtime.tasks import beside
from penstock.runtime.threads import started_threads, to_its_end

_AHEAD_BYTES = 32 << 20
"""Pages that wait, already provided by the kernel, for the next blocks: a first touch costs ten copies."""
_STEP_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class HostForm:
    """The division of the arena for one spec; without a spec it has no slots."""

    spec: KvSpec | None
    table: BlockTable
    bringer: Bringer


@dataclass(frozen=True, slots=True)
class _HostWatcher:
    """Passes the table's changes on to the clients that map the arena, to the watchers, and to other tiers."""

    arena: Arena
    tiers: Tiers
    watchers: list[BlockWatcher]
    handed_out: asyncio.Event
    find: Callable[[bytes], Block | None]
    """Whether a block is in host memory, here or lent."""

    def block_stored(self, block: Block) -> None:
        self.tiers.moved(TierKind.HOST, block.key)
        for watcher in self.watchers:
            watcher.block_stored(block)

    def block_removed(self, block: Block) -> None:
        self.tiers.moved(TierKind.HOST, block.key)
        if self.find(block.key) is None:
            for watcher in self.watchers:
                watcher.block_removed(block)

    def slot_held(self, slot: int, epoch: int) -> None:
        self.arena.set_epoch(slot, epoch)
        if epoch:
            self.handed_out.set()


class HostTier:
    """KeepingTier, Follower. Made by `open_host`; used from its event loop."""

    kind = TierKind.HOST

    def __init__(self, config: KvStoreConfig, arena: Arena, tiers: Tiers, rules: Rules, *, copier: Executor) -> None:
        """`copier` is a thread for copies of lent blocks."""
        self.arena = arena
        self._config = config
        self._tiers = tiers
        self._rules = rules
        self.handed_out = asyncio.Event()
        """Set whenever a slot gets a holder."""
        self._watchers: list[BlockWatcher] = []
        self._listeners: list[Callable[[BlockUse], None]] = []
        self._alarm = Alarm(rules.now, lambda: self.table)
        self._log = structlog.get_logger("penstock.kvstore")
        self._watcher = _HostWatcher(arena, tiers, self._watchers, self.handed_out, self.find_block)
        self.lent = LentBlocks(self, self._watcher, copier, rules.now)
        """Those of host memory that lie in clients' pages."""
        self._form = self._formed(None, Layout(0, 0, 1), 0)

    def _formed(self, spec: KvSpec | None, layout: Layout, block_bytes: int) -> HostForm:
        table = BlockTable(
            layout.slots,
            block_bytes,
            self._watcher,
            policy=self._rules.policy,
            promises=self._rules.promises(layout.slots),
            epochs=self._rules.epochs,
            reserve_s=self._config.reserve_s,
            cooling_s=self._config.cooling_s,
            wake=self._alarm.ring_at,
        )
        return HostForm(spec, table, Bringer(table, self.arena, self._rules.now, self._rules.failed))

    @property
    def table(self) -> BlockTable:
        """The blocks of the spec in use. Another one takes its place when the spec changes."""
        return self._form.table

    @property
    def bringer(self) -> Bringer:
        """Brings blocks into `table`."""
        return self._form.bringer

    def room(self) -> Room:
        """Makes room for blocks that the store itself brings without the bringer."""
        return Room(self.table, self.arena, self._rules.now, lambda: None)

    def capacity(self) -> int:
        """How many blocks the arena holds."""
        return self.table.slots.count

    def in_arena(self, key: bytes) -> bool:
        """Whether the block is in the arena, lent or not."""
        return key in self.table

    def view(self, block: Block) -> memoryview:
        """The bytes of a block of `table`, writable. The caller releases it."""
        return self.arena.block(block.slot, self.table.block_bytes)

    # -- who hears of changes

    @contextmanager
    def watched_by(self, watcher: BlockWatcher) -> Iterator[None]:
        """The watcher hears of every block that comes or goes, for the length of the block."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    @contextmanager
    def uses_heard_by(self, listener: Callable[[BlockUse], None]) -> Iterator[None]:
        """Calls the listener with each use of blocks here, for the length of the block. It must not do I/O."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def lease_given(self, lease: Lease) -> None:
        """Tells the listeners of a lease that has grown as far as it could."""
        self._tell(BlockUse(lease.session, lease.blocks, len(lease.brought)))

    def _tell(self, use: BlockUse) -> None:
        for listener in self._listeners:
            listener(use)

    # -- as a tier

    @property
    def spec(self) -> KvSpec | None:
        """The spec for which the arena is divided; None before the first client."""
        return self._form.spec

    @property
    def busy(self) -> bool:
        """Whether a client or a bringing uses the table. Takes back what has expired first."""
        self.table.expire(self._rules.now())
        return not self.table.idle or self.bringer.flights > 0 or self.lent.busy

    def format_for(self, spec: KvSpec) -> None:
        """Divides the arena into slots for `spec` and forgets all blocks. The caller has checked that one fits."""
        layout = Layout.fit(self.arena.size, spec.block_bytes)
        self.arena.format(layout)
        self.lent.format()
        self._form = self._formed(spec, layout, spec.block_bytes)
        self.handed_out.set()
        self._log.info("formatted", slots=layout.slots, block_bytes=spec.block_bytes, model=spec.model[:12])

    def suppliers(self, wish: Wish) -> Sequence[Supplier]:
        """Returns who copies lent blocks into the arena, when there are any."""
        return (self.lent,) if len(self.lent) else ()

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """Counts the leading keys that are in host memory."""
        table, lent = self.table, self.lent
        return sum(1 for _ in takewhile(lambda key: key in table or lent.find(key) is not None, keys))

    def find_block(self, key: bytes) -> Block | None:
        """Finds a block in host memory, of the arena first; None: it is not there."""
        return self.table.find(key) or self.lent.find(key)

    def stored_keys(self) -> Iterable[bytes]:
        """Lists the keys in host memory, each once."""
        return dict.fromkeys(chain(self.table.keys(), self.lent.keys())) if len(self.lent) else self.table.keys()

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Promises blocks in host memory, stored or still to come, as far as the tenant's budget there goes."""
        return self.table.promise(keys, seconds, namespace, self._rules.now())

    def renew_promises(self, keys: Sequence[bytes]) -> None:
        """Renews what host memory has promised of these blocks."""
        self.table.renew(keys, self._rules.now())

    def touch_blocks(self, keys: Sequence[bytes], session: str) -> None:
        """Counts as a lease of the blocks that are in host memory."""
        found = {block.key: block for block in self.table.touch_all(keys, session, self._rules.now())}
        for key in keys:
            lent = self.lent.touch(key, session)
            if lent is not None:
                found.setdefault(key, lent)
        self._tell(BlockUse(session, [found[key] for key in keys if key in found]))

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """Passes the hint to the eviction policy of host memory."""
        self.table.expect_session(session, hint)

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        """Has a tenant's blocks leave host memory. Those that are lent are in workers' pages, and count there."""
        self.lent.drop_tenant(namespace)
        return await drop_tenant(self.table, self.kind, namespace)

    def figures(self) -> Mapping[str, int]:
        """Returns the statistics of the table."""
        return {**asdict(self.table.stats()), **self.lent.figures()}

    def pages(self) -> int:
        """Bytes of the arena that are worth having pages: those of all slots ever used, and some ahead."""
        if not self.table.slots.count:
            return 0
        return min(self.arena.size, self.arena.layout.offset(self.table.slots.frontier) + _AHEAD_BYTES)

    def close(self) -> None:
        """Stops the alarm: expired leases and reservations are no longer taken back by themselves."""
        self._alarm.cancel()


@asynccontextmanager
async def open_host(config: KvStoreConfig, tiers: Tiers, rules: Rules) -> AsyncIterator[HostTier]:
    """Host memory as one of `tiers`. Leave it when no client reads or writes any more."""
    arena = Arena(config.host_bytes)
    try:
        with started_threads(1, "penstock-lent") as copier:
            host = HostTier(config, arena, tiers, rules, copier=copier)
            try:
                with started_threads(1, "penstock-pages") as thread, tiers.keeping(host), tiers.followed_by(host):
                    provide = partial(provide_pages, host, thread)
                    async with (
                        beside(provide, name="kvstore pages", on_failure="restart", failed=rules.failed),
                        beside(host.lent.run, name="rescue", on_failure="restart", failed=rules.failed),
                    ):
                        yield host
            finally:
                host.close()
    finally:
        arena.close()


async def provide_pages(host: HostTier, thread: Executor) -> None:
    """Has the kernel provide pages ahead of need, in `thread`, until cancelled; returns when this kernel can't."""
    provided = 0
    while True:
        await host.handed_out.wait()
        host.handed_out.clear()
        while provided < host.pages():
            step = min(_STEP_BYTES, host.arena.size - provided)
            if not await to_its_end(thread, partial(host.arena.populate, provided, step)):
                structlog.get_logger("penstock.kvstore").info("pages can't be provided ahead on this kernel")
                return
            provided += step
