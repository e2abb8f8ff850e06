"""A KV store from its settings: its tiers, the ways to other stores, and the server in front of them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import grpc

from penstock.kv.bytes import bulk
from penstock.kv.device.cuda import open_cuda
from penstock.kv.events import EventHub
from penstock.kv.eviction import make_policy
from penstock.kv.eviction.promised import KeepPromised
from penstock.kv.eviction.shares import TenantShares
from penstock.kv.spec import KvSpec
from penstock.kvstore.claiming import ClaimDesk
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.elsewhere.awaiting import RemoteWaits
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.tier import Elsewhere, open_elsewhere
from penstock.kvstore.events.membership import StoreMembership
from penstock.kvstore.events.wire.format import Held
from penstock.kvstore.events.wire.publisher import Publisher, Translator, WireOptions, open_publisher
from penstock.kvstore.examining import examined
from penstock.kvstore.messages import Reports, hear
from penstock.kvstore.part import MeshPart
from penstock.kvstore.partitions import Partition, Partitions
from penstock.kvstore.servicer import Servicer
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.store import Store, open_store
from penstock.kvstore.table.blocks import BlockPolicy, TableStats, TierKind
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.tiers.base import Rules, added
from penstock.kvstore.tiers.device.messages import DeviceFace, NoDeviceFace
from penstock.kvstore.tiers.device.opening import OpenDevice, open_device_tier
from penstock.kvstore.tiers.device.readers import DeviceReaders
from penstock.kvstore.tiers.device.tier import DeviceTier, GpuStats
from penstock.kvstore.tiers.disk.opening import Disk, open_disk, open_spaces, spaces_figures
from penstock.kvstore.tiers.disk.spaces import Spaces
from penstock.kvstore.tiers.host import HostTier, open_host
from penstock.kvstore.tiers.tiers import Tiers
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import serve
from penstock.runtime.metrics import StoreMetrics
from penstock.runtime.tasks import Failed, beside
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name
_GRACE_S = 2.0
_MEDIA = {TierKind.GPU: "GPU", TierKind.HOST: "CPU", TierKind.NVME: "DISK"}
"""Names of the tiers in the events for others' routers."""


class KvStore:
    """A running store. Made by `open_kvstore`."""

    def __init__(
        self,
        partitions: Partitions,
        reports: Reports,
        *,
        address: str,
        events: Publisher | None,
        metrics: StoreMetrics,
    ) -> None:
        self.partitions = partitions
        self.address = address
        self.events = events
        self.metrics = metrics
        self._first = next(iter(partitions))
        self._reports = reports

    @property
    def store(self) -> Store:
        """That of the first partition."""
        return self._first.store

    @property
    def host(self) -> HostTier:
        """Host memory of the first partition."""
        return self._first.host

    @property
    def disk(self) -> Disk | None:
        """The disk of the first partition, when there is one."""
        return self._first.disk

    @property
    def gpu(self) -> DeviceTier | None:
        """The device tier of the first partition, when there is one."""
        return self._first.gpu

    @property
    def elsewhere(self) -> Elsewhere:
        """The other stores, as the first partition asks them."""
        return self._first.elsewhere

    def stats(self) -> TableStats:
        """The figures of host memory."""
        return self.partitions.stats()

    def figures(self) -> dict[str, float]:
        """Of host memory, the disk, and other stores, for metrics."""
        claims = [part.store.claims for part in self.partitions]
        return {
            **self._reports[TierKind.HOST](),
            "claims": sum(map(len, claims)),
            "claimed_blocks": sum(one.blocks for one in claims),
            "claim_waits": sum(one.waiting for one in claims),
            **{f"nvme_{name}": value for name, value in self._reports.get(TierKind.NVME, dict)().items()},
            **self._reports[TierKind.REMOTE](),
        }

    def device_figures(self) -> Mapping[str, float]:
        """Of the device, for metrics; zeros without one."""
        return self._reports.get(TierKind.GPU, _no_device)()


@asynccontextmanager
async def open_kvstore(config: KvStoreConfig, open_device: OpenDevice = open_cuda) -> AsyncIterator[KvStore]:
    """Serves until the block ends, then: attachments and subscriptions end, calls drain, what has earned the disk is
    written, the memory is freed.

    Raises ConfigError. `open_device` is for tests: another kind of device.
    """
    metrics = StoreMetrics()
    rules = rules_of(config, metrics.task_failed)
    member = MemberIdentity.of(config.member_tls, "store")
    async with open_channels(member) as channels, _open_partitions(config, channels, rules, open_device) as opened:
        partitions, reports, commons = opened
        async with _publishing(config, partitions, commons.hub, rules.failed) as events:
            register = partial(_register, partitions, commons, config, reports)
            examine = partial(examined, config, reports)
            async with serve(
                config.address, register, [_NAME], grace=_GRACE_S, examine=examine, member=member
            ) as server:
                address = config.address.at(server.port)
                neighbours = commons.neighbours
                neighbours.own = config.advertise or address
                announce = partial(neighbours.announce, commons.hub, partitions.keys, rules.failed)
                async with (
                    beside(announce, name="announcing", on_failure="restart", failed=rules.failed),
                    _membership(
                        config, channels, commons, rules, MeshPart(partitions, reports, commons.sessions, config)
                    ),
                ):
                    await server.set_serving(True)
                    served = KvStore(partitions, reports, address=address, events=events, metrics=metrics)
                    faults = partial(_faults, partitions)
                    metrics.watch(served.figures, faults, served.device_figures, partitions.figures)
                    try:
                        yield served
                    finally:
                        await partitions.stop()


def rules_of(config: KvStoreConfig, failed: Failed) -> Rules:
    """The rules that the tables of all tiers share."""
    now = time.monotonic

    def promises(slots: int) -> Promises:
        return Promises(int(config.retain_share * slots), int(config.retain_tenant_share * slots), config.retain_s)

    def policy() -> BlockPolicy:
        ranked: BlockPolicy = make_policy(config.eviction, now)
        if config.tenant_share < 1:
            ranked = TenantShares(ranked, config.tenant_share)
        return KeepPromised(ranked, now)

    return Rules(
        now=now,
        epochs=itertools.count(1),
        policy=policy,
        promises=promises,
        failed=failed,
    )


@dataclass(frozen=True, kw_only=True)
class _Commons:
    """What the partitions share."""

    config: KvStoreConfig
    """Of one of them."""
    rules: Rules
    sessions: SessionTable
    hub: EventHub[TierKind]
    neighbours: Neighbours
    open_device: OpenDevice
    spaces: Spaces | None = None
    last: Sequence[KvSpec] = ()
    """The specs that the last process used, of which the disk may have blocks."""


@asynccontextmanager
async def _open_partitions(
    config: KvStoreConfig, channels: Channels, rules: Rules, open_device: OpenDevice
) -> AsyncIterator[tuple[Partitions, Reports, _Commons]]:
    """The partitions of `config`, the figures of their tiers together, and what they share."""
    parts: list[Partition] = []
    hub: EventHub[TierKind] = EventHub(lambda: chain.from_iterable(part.store.tiers.places() for part in parts))
    async with AsyncExitStack() as stack:
        spaces = None
        if config.nvme_dir is not None:
            spaces = stack.enter_context(open_spaces(config, config.nvme_dir, rules))
        commons = _Commons(
            config=config.share(),
            rules=rules,
            sessions=SessionTable(),
            hub=hub,
            neighbours=Neighbours(config.peers, channels, max_keys=config.home_keys),
            open_device=open_device,
            spaces=spaces,
            last=await spaces.last_specs() if spaces else (),
        )
        for number in range(config.partitions):
            parts.append(await stack.enter_async_context(_open_partition(number, commons)))
        drafts = range(config.partitions, 2 * config.partitions) if config.draft_bytes else ()
        for_drafts = [await stack.enter_async_context(_open_draft_partition(number, commons)) for number in drafts]
        yield Partitions([*parts, *for_drafts], config.max_clients), _reports(parts, spaces), commons


@asynccontextmanager
async def _open_partition(number: int, commons: _Commons) -> AsyncIterator[Partition]:
    """One partition. Its tiers close in the opposite order: other stores, the device, the disk, host memory."""
    config, rules, sessions = commons.config, commons.rules, commons.sessions
    tiers, disk, gpu = Tiers(commons.hub), None, None
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(config, tiers, rules))
        if commons.spaces is not None:
            opening = open_disk(
                commons.spaces,
                host,
                sessions,
                number=number,
                last=commons.last[number] if number < len(commons.last) else None,
                tiers=tiers,
                rules=rules,
                flush_s=config.nvme_flush_s,
            )
            disk = await stack.enter_async_context(opening)
        if config.gpu_bytes:
            gpu = await stack.enter_async_context(
                open_device_tier(config, host, sessions, tiers=tiers, rules=rules, open_device=commons.open_device)
            )
        elsewhere = await stack.enter_async_context(
            open_elsewhere(config, host, commons.neighbours, tiers=tiers, rules=rules)
        )
        store = await stack.enter_async_context(open_store(config, tiers, host, sessions=sessions, rules=rules))
        yield Partition(
            number=number,
            store=store,
            host=host,
            elsewhere=elsewhere,
            device=DeviceFace(DeviceReaders(gpu.blocks, rules.now)) if gpu else NoDeviceFace(),
            desk=ClaimDesk(store, RemoteWaits(commons.neighbours)),
            disk=disk,
            gpu=gpu,
        )


@asynccontextmanager
async def _open_draft_partition(number: int, commons: _Commons) -> AsyncIterator[Partition]:
    """One for a draft model: in host memory. Nobody but its clients asks for its blocks, so no member of the mesh hears
    of them."""
    apart = replace(commons, config=commons.config.of_draft(), hub=EventHub(lambda: ()), spaces=None)
    async with _open_partition(number, apart) as part:
        yield replace(part, draft=True)


def _reports(parts: Sequence[Partition], spaces: Spaces | None) -> Reports:
    """The figures of each tier that the store is set up with, of these partitions together."""
    reports: dict[TierKind, Callable[[], Mapping[str, Any]]] = {
        TierKind.HOST: lambda: added([part.host.figures() for part in parts]),
        TierKind.REMOTE: lambda: added([part.elsewhere.figures() for part in parts]),
    }
    if spaces is not None:
        disks = [part.disk for part in parts if part.disk is not None]
        reports[TierKind.NVME] = partial(spaces_figures, spaces, disks)
    gpus = [part.gpu for part in parts if part.gpu is not None]
    if gpus:
        reports[TierKind.GPU] = lambda: added([gpu.figures() for gpu in gpus])
    return reports


def _faults(partitions: Partitions) -> Counter[str]:
    return sum((part.elsewhere.faults for part in partitions), Counter[str]())


def _no_device() -> Mapping[str, Any]:
    return asdict(GpuStats())


@asynccontextmanager
async def _membership(
    config: KvStoreConfig, channels: Channels, commons: _Commons, rules: Rules, part: MeshPart
) -> AsyncIterator[None]:
    """The store is a member of the mesh, when there are routers to join."""
    if not config.router:
        yield
        return
    member = StoreMembership(
        [channels.to(router, "router") for router in config.router],
        commons.neighbours.own,
        commons.hub,
        host_id=config.host_id,
        others=commons.neighbours.set_joined,
        heard=lambda hint: hear(commons.sessions, hint, rules.now()),
        load=part.load,
        evict=part.evict,
    )
    async with beside(member.run, name="membership", on_failure="restart", failed=rules.failed):
        yield


@asynccontextmanager
async def _publishing(
    config: KvStoreConfig, partitions: Partitions, hub: EventHub[TierKind], failed: Failed
) -> AsyncIterator[Publisher | None]:
    """Block events for others' routers, when an address is configured."""
    if not config.events_address:
        yield None
        return
    options = WireOptions(
        address=config.events_address,
        replay_address=config.events_replay_address,
        topic=config.events_topic,
        style=config.events_style,
    )
    async with open_publisher(options, failed) as publisher:
        with hub.subscribe() as subscriber:
            follow = partial(publisher.follow, subscriber, Translator(partial(_held, partitions)))
            async with beside(follow, name="block events", on_failure="restart", failed=failed) as following:
                try:
                    yield publisher
                finally:
                    hub.close()
                    await following.ended()  # the last events go out before the sockets close


def _held(partitions: Partitions, key: bytes) -> Held | None:
    """Finds the block of `key`, for the events."""
    found = partitions.find(key)
    if found is None:
        return None
    kind, block, tokens = found
    return Held(key, block.parent, block.first_token, _MEDIA[kind], tokens)


def _register(
    partitions: Partitions, commons: _Commons, config: KvStoreConfig, reports: Reports, server: grpc.aio.Server
) -> None:
    servicer = Servicer(
        partitions,
        commons.sessions,
        commons.hub,
        commons.neighbours,
        config=config,
        reports=reports,
        now=commons.rules.now,
    )
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(servicer, server)
    bulk.serve_read(server, servicer.Read)
