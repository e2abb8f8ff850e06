"""Owns what a running store consists of: the arena, the block table, the subscribers, and the clock.

A store keeps blocks of one KvSpec at a time. The first client fixes it; a client with another spec is refused
with the difference named, for as long as anybody is attached. Two specs could share slots of equal size, since
their keys differ, but then a worker with the wrong weights would look healthy and never hit; a refusal is seen.
When nobody is attached, a new spec empties the store: those who could read the old blocks are gone. Two models on
one host are two stores.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Protocol

import structlog

from penstock.errors import NotFound, Overloaded, Refused, Unavailable
from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.events.hub import EventHub
from penstock.kvstore.events.wire.format import Held
from penstock.kvstore.eviction import make_policy
from penstock.kvstore.eviction.promised import KeepPromised
from penstock.kvstore.sessions import SessionPhase, SessionTable
from penstock.kvstore.table.blocks import Block, BlockPolicy, Lease, TableStats, TierKind
from penstock.kvstore.table.promises import Grant
from penstock.kvstore.table.shelf import Watcher
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Supplier
from penstock.kvstore.tiers.bringing import Bringer
from penstock.kvstore.tiers.disk.opening import Disk
from penstock.runtime.config import format_size

_AHEAD_BYTES = 32 << 20
"""Pages that wait, already provided by the kernel, for the next blocks: a first touch costs ten copies."""
_STEP_BYTES = 4 << 20
_MEDIA = {TierKind.GPU: "GPU", TierKind.HOST: "CPU", TierKind.NVME: "DISK"}
"""Names of the tiers in the events for others' routers."""
_FRUITLESS = 1000
"""Blocks stored, and blocks missed, without a hit: no workload of turns looks like that."""
_NOTHING = TableStats(*[0] * 18)


@dataclass(frozen=True, slots=True)
class _Announcer:
    """Passes the table's changes on: to subscribers, and to those who map the arena."""

    arena: Arena
    hub: EventHub
    tier_of: Callable[[bytes], TierKind | None]
    watchers: list[Watcher]
    grown: asyncio.Event
    """A slot was handed out."""

    def block_stored(self, block: Block) -> None:
        self.hub.note(block.key, self.tier_of(block.key))
        for watcher in self.watchers:
            watcher.block_stored(block)

    def block_removed(self, block: Block) -> None:
        self.hub.note(block.key, self.tier_of(block.key))
        for watcher in self.watchers:
            watcher.block_removed(block)

    def slot_held(self, slot: int, epoch: int) -> None:
        self.arena.set_epoch(slot, epoch)
        if epoch:
            self.grown.set()
        for watcher in self.watchers:
            watcher.slot_held(slot, epoch)


class Layer(Protocol):
    """A tier whose slots hold blocks of one size, as those of the arena do."""

    @property
    def busy(self) -> bool:
        """It can't be formatted now."""
        ...

    def format(self, spec: KvSpec) -> None:
        """Forgets its blocks, and takes those of `spec` from now on."""


class Keeper:
    """The store behind the service. All calls on one event loop; `run` beside them, `close` at the end."""

    def __init__(self, config: KvStoreConfig) -> None:
        self._config = config
        self.arena = Arena(config.host_bytes)
        self.hub = EventHub(self._keys)
        self.sessions = SessionTable()
        self.sessions.changed.append(self._expect)
        self.spec: KvSpec | None = None
        self.closing = asyncio.Event()
        self.suppliers: list[Supplier] = []
        """Asked in this order for what host memory has not. Who adds one says by `moved` what comes and goes there."""
        self.layers: list[Layer] = []
        """Tiers that are cut up anew with the arena."""
        self.watchers: list[Watcher] = []
        """Hear of every change of the host tier."""
        self._grown = asyncio.Event()
        self._announcer = _Announcer(self.arena, self.hub, self.tier_of, self.watchers, self._grown)
        self._store: BlockTable | None = None
        self._bringer: Bringer | None = None
        self.epochs = itertools.count(1)
        """Of all tiers."""
        self._timer: asyncio.TimerHandle | None = None
        self._armed = 0.0
        self._suspected = False
        self._touched = 0
        self._log = structlog.get_logger("penstock.kvstore")
        self.disk: Disk | None = None
        if config.nvme_dir is not None:
            try:
                self.disk = Disk(
                    *(config, self.arena, self.sessions, self.now),
                    moved=self.moved,
                    changed=self.hub.restart,
                    policy=self.policy,
                )
            except BaseException:
                self.arena.close()
                raise
            self.suppliers.append(self.disk.tier)
            self.watchers.append(self.disk.mover)

    def policy(self) -> BlockPolicy:
        """Who goes first, in every tier."""
        return KeepPromised(make_policy(self._config.eviction, self.now), self.now)

    @property
    def store(self) -> BlockTable:
        """The table. Raises NotFound before the first client."""
        if self._store is None:
            raise NotFound("no such attachment: attach first", field="attachment_id")
        return self._store

    def now(self) -> float:
        """The table's clock."""
        return time.monotonic()

    def stats(self) -> TableStats:
        """Figures of the table; zeros before the first client."""
        return self._store.stats() if self._store else _NOTHING

    def figures(self) -> dict[str, float]:
        """Of all tiers, for metrics."""
        disk = self.disk.figures() if self.disk is not None else {}
        return asdict(self.stats()) | {f"nvme_{name}": value for name, value in disk.items()}

    # -- all tiers

    def held(self, key: bytes) -> Held | None:
        """What is stored under `key`, for the events."""
        tier = self.tier_of(key)
        places = [self._store.find] if self._store is not None else []
        for find in (*places, *(one.find for one in self.suppliers)):
            if tier is not None and (block := find(key)) is not None:
                return Held(key, block.parent, block.first_token, _MEDIA[tier])
        return None

    def block_size(self) -> int:
        """Tokens per block; 0 before the first client."""
        spec = self.spec or (self.disk.tier.spec if self.disk is not None else None)
        return spec.block_size if spec else 0

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored, in whatever tier; also before the first client."""
        found = self._store.lookup(keys) if self._store else 0
        while found < len(keys):
            rest = keys[found:]
            more = max((one.has(rest) for one in self.suppliers), default=0)
            if not more:
                break
            found += more
            found += self._store.lookup(keys[found:]) if self._store else 0
        return found

    async def lease(
        self,
        attachment_id: str,
        keys: Sequence[bytes],
        seconds: float,
        wait_s: float,
        session: str = "",
        more: Sequence[Supplier] = (),
    ) -> Lease | None:
        """Pins the leading blocks that any tier has, for `seconds`; None when there is none.

        What is not in host memory is brought there by the store's suppliers, then by `more`, within `wait_s`.
        """
        store, suppliers, now = self.store, [*self.suppliers, *more], self.now()
        if self.disk is not None:
            self.disk.tier.renew(keys)
        lease = store.leases.take(attachment_id, keys, seconds, now, session, grows=bool(suppliers))
        if lease is not None and len(lease.blocks) < len(keys) and suppliers:
            lease = await self._grow(lease, keys, suppliers, now + min(wait_s, self._config.bring_s))
        if lease is None:
            self._suspect()
        elif self.disk is not None:
            self.disk.mover.leased(lease, keys)
        return lease

    def _suspect(self) -> None:
        """Says once that much is stored and nothing is ever found, as when clients name the same tokens differently."""
        stats = self.stats()
        if not self._suspected and not stats.hits and min(stats.puts, stats.misses) >= _FRUITLESS:
            self._suspected = True
            self._log.warning("many blocks were stored and asked for, and none was ever found: do all clients agree?")

    async def _grow(
        self, lease: Lease, keys: Sequence[bytes], suppliers: Sequence[Supplier], until: float
    ) -> Lease | None:
        store = self.store
        assert self._bringer is not None
        try:
            await self._bringer.fill(lease, keys, suppliers, until)
        except BaseException:
            store.leases.abandon(lease, self.now())
            raise
        return store.leases.settle(lease, len(keys), self.now())

    def retain(self, attachment_id: str, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Has every tier promise what it can; the answer is that of the one which promised most."""
        now = self.now()
        self.store.check_attached(attachment_id)
        grants = [self.store.promise(keys, seconds, namespace, now)]
        if self.disk is not None:
            grants.append(self.disk.tier.promise(keys, seconds, namespace))
            self.disk.mover.promised(keys[: grants[-1].blocks])
        return max(grants, key=lambda grant: grant.blocks)

    def _expect(self, session: str) -> None:
        """Passes on to the eviction policy what is new of a session."""
        outlook = self.sessions.outlook(session)
        if self._store is not None and outlook is not None:
            returns_at = outlook.expected_at if outlook.expected_at < math.inf else None
            expected = ReturnHint(ended=outlook.state is SessionPhase.ENDED, returns_at=returns_at)
            self._store.expect_session(session, expected)
            if self.disk is not None:
                self.disk.tier.expect(session, expected)

    def tier_of(self, key: bytes) -> TierKind | None:
        """The nearest tier of this store that has a block."""
        found = TierKind.HOST if self._store is not None and key in self._store else None
        for one in self.suppliers:
            tier = one.tier
            if tier is not TierKind.REMOTE and (found is None or tier < found) and one.find(key) is not None:
                found = tier
        return found

    def moved(self, key: bytes) -> None:
        """A supplier has a block now, or has it no more: those who listen are told where it is."""
        if self._store is None or key not in self._store:
            self.hub.note(key, self.tier_of(key))

    def all_keys(self) -> Iterable[bytes]:
        """All that can be found, each once."""
        return dict.fromkeys(key for _, keys in self._places() for key in keys)

    def placed(self, key: bytes) -> None:
        """As `moved`, by a tier that is nearer than host memory."""
        self.hub.note(key, self.tier_of(key))

    def _keys(self) -> Iterable[tuple[bytes, TierKind]]:
        """All that can be found, and where; what comes and goes between two steps is left to the changes."""
        for tier, keys in [(tier, list(keys)) for tier, keys in self._places()]:
            yield from ((key, tier) for key in keys if self.tier_of(key) is tier)

    def _places(self) -> Iterable[tuple[TierKind, Iterable[bytes]]]:
        if self._store is not None:
            yield TierKind.HOST, self._store.keys()
        for supplier in self.suppliers:
            yield supplier.tier, supplier.all_keys()

    # -- attachments

    def attach(self, client: str, spec: KvSpec, *, peer: bool = False) -> str:
        """A new attachment's id. A `peer` only reads what is there: nothing is emptied for it.

        Raises Refused, Overloaded, Unavailable.
        """
        if self.closing.is_set():
            raise Unavailable("the store is stopping")
        if self.stats().attachments >= self._config.max_clients:
            raise Overloaded(f"{self._config.max_clients} clients are attached already", retry_after=5.0)
        if self._store is None or spec != self.spec:
            if peer and not (self._store is None and self.disk is not None and spec == self.disk.tier.spec):
                differs = self.spec.difference(spec) if self.spec else "nothing is stored"
                raise Refused(f"there are no blocks of this KV spec here: {differs}")
            self._change_spec(spec)
        attachment_id = secrets.token_hex(16)
        self.store.attach(attachment_id, client)
        self._log.info("client attached", client=client)
        return attachment_id

    def detach(self, attachment_id: str, client: str) -> None:
        """Takes back all that the attachment owns."""
        self.store.detach(attachment_id, self.now())
        self._log.info("client detached", client=client)

    def _change_spec(self, spec: KvSpec) -> None:
        layout = Layout.fit(self.arena.size, spec.block_bytes)
        if layout.slots == 0:
            size = format_size(self.arena.size)
            raise Refused(f"a block of {format_size(spec.block_bytes)} does not fit into a store of {size}")
        if self._store is not None and self.spec is not None:
            self._store.expire(self.now())
            if self._store.stats().attachments:
                raise Refused(f"the store is in use with another KV spec: {self.spec.difference(spec)}")
            if not self._store.idle or (self._bringer is not None and self._bringer.flights):
                raise Unavailable("the store waits for the last writers of another KV spec", retry_after=1.0)
        if any(layer.busy for layer in self.layers):
            raise Unavailable("the store waits for the last copies of another KV spec", retry_after=1.0)
        self.arena.format(layout)
        self.spec = spec
        self._store = BlockTable(
            layout.slots,
            spec.block_bytes,
            self._announcer,
            policy=self.policy,
            promises=self._config.promises(layout.slots),
            epochs=self.epochs,
            reserve_s=self._config.reserve_s,
            cooling_s=self._config.cooling_s,
            wake=self._wake,
        )
        self._bringer = Bringer(self._store, self.arena, self.now)
        if self.disk is not None:
            self.disk.tier.use(spec)
            self.disk.mover.use(self._store, self._bringer)
        for layer in self.layers:
            layer.format(spec)
        self.hub.restart()
        self._log.info("formatted", slots=layout.slots, block_bytes=spec.block_bytes, model=spec.model[:12])
        self._grown.set()

    # -- time and memory

    def _wake(self, end: float) -> None:
        """Sees to it that what ends at `end` is taken back then."""
        if self.closing.is_set():
            return
        if self._timer is not None:
            if self._armed <= end:
                return
            self._timer.cancel()
        self._armed = end
        self._timer = asyncio.get_running_loop().call_later(max(0.001, end - self.now()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.store.expire(self.now())
        if (end := self.store.next_end()) is not None:
            self._wake(end)

    def _wanted(self) -> int:
        if self._store is None:
            return 0
        return min(self.arena.size, self.arena.layout.offset(self._store.slots.frontier) + _AHEAD_BYTES)

    async def open(self) -> None:
        """Finds what is on the disk."""
        if self.disk is not None:
            await self.disk.open()

    async def run(self) -> None:
        """Moves blocks and provides pages, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._provide())
            if self.disk is not None:
                tasks.create_task(self.disk.run())

    async def _provide(self) -> None:
        """Provides pages ahead of need, in a thread, until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "penstock-pages") as thread:
            while True:
                await self._grown.wait()
                self._grown.clear()
                while self._touched < self._wanted():
                    step = min(_STEP_BYTES, self.arena.size - self._touched)
                    if not await loop.run_in_executor(thread, self.arena.populate, self._touched, step):
                        self._log.info("pages can't be provided ahead on this kernel")
                        return
                    self._touched += step

    def stop(self) -> None:
        """Ends all attachments and subscriptions: their streams return."""
        self.closing.set()
        self.hub.close()

    async def settle(self) -> None:
        """Ends what is being brought. After `stop`."""
        if self._bringer is not None:
            await self._bringer.close()

    async def close(self) -> None:
        """Writes to the disk what should outlive the process, and frees the arena. When nothing runs any more."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            if self.disk is not None:
                await self.disk.close()
        finally:
            self.arena.close()
