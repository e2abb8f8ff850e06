"""A KV store from its settings: its tiers, the ways to other stores, and the server in front of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import grpc

from penstock.kv.bytes import bulk
from penstock.kv.device.cuda import open_cuda
from penstock.kv.eviction import make_policy
from penstock.kv.eviction.promised import KeepPromised
from penstock.kv.eviction.shares import TenantShares
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.tier import Elsewhere, open_elsewhere
from penstock.kvstore.events.membership import StoreMembership
from penstock.kvstore.events.wire.format import Held
from penstock.kvstore.events.wire.publisher import Publisher, Translator, WireOptions, open_publisher
from penstock.kvstore.messages import Reports, hear
from penstock.kvstore.servicer import Servicer
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.store import Store, open_store
from penstock.kvstore.table.blocks import BlockPolicy, TableStats, TierKind
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.tiers.base import Rules
from penstock.kvstore.tiers.device.messages import DeviceFace, NoDeviceFace
from penstock.kvstore.tiers.device.opening import OpenDevice, open_device_tier
from penstock.kvstore.tiers.device.readers import DeviceReaders
from penstock.kvstore.tiers.device.tier import DeviceTier, GpuStats
from penstock.kvstore.tiers.disk.opening import Disk, open_disk
from penstock.kvstore.tiers.host import HostTier, open_host
from penstock.kvstore.tiers.tiers import Tiers
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.server import serve
from penstock.runtime.metrics import StoreMetrics
from penstock.runtime.tasks import Failed, beside
from penstock.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name
_GRACE_S = 2.0
_MEDIA = {TierKind.GPU: "GPU", TierKind.HOST: "CPU", TierKind.NVME: "DISK"}
"""Names of the tiers in the events for others' routers."""


@dataclass(frozen=True, kw_only=True)
class OpenTiers:
    """The open tiers: all of them, and each by its name; a disk or a device only if the settings name one."""

    tiers: Tiers
    host: HostTier
    elsewhere: Elsewhere
    disk: Disk | None = None
    gpu: DeviceTier | None = None
    reports: Reports
    """The figures of those that are there."""


class KvStore:
    """A running store. Made by `open_kvstore`."""

    def __init__(
        self,
        store: Store,
        places: OpenTiers,
        *,
        address: str,
        events: Publisher | None,
        metrics: StoreMetrics,
    ) -> None:
        self.store = store
        self.host = places.host
        self.disk = places.disk
        """When there is one."""
        self.gpu = places.gpu
        """The tier on a device, when there is one."""
        self.elsewhere = places.elsewhere
        self.address = address
        self.events = events
        self.metrics = metrics
        self._reports = places.reports

    def stats(self) -> TableStats:
        """The figures of host memory."""
        return self.store.stats()

    def figures(self) -> dict[str, float]:
        """Of host memory, the disk, and other stores, for metrics."""
        disk = self._reports.get(TierKind.NVME, dict)()
        return {
            **self.host.figures(),
            "claims": len(self.store.claims),
            "claimed_blocks": self.store.claims.blocks,
            "claim_waits": self.store.claims.waiting,
            **{f"nvme_{name}": value for name, value in disk.items()},
            **self.elsewhere.figures(),
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
    metrics, sessions = StoreMetrics(), SessionTable()
    rules = rules_of(config, metrics.task_failed)
    async with (
        _open_tiers(config, sessions, rules, open_device) as places,
        open_channels() as channels,
        _publishing(config, places.tiers, rules.failed) as events,
        open_store(config, places.tiers, places.host, sessions=sessions, rules=rules) as store,
    ):
        register = partial(_register, store, places, _face(places, rules), config)
        async with serve(config.address, register, [_NAME], grace=_GRACE_S) as server:
            address = config.address.at(server.port)
            neighbours, hub = places.elsewhere.neighbours, places.tiers.hub
            neighbours.own = config.advertise or address
            announce = partial(neighbours.announce, hub, places.tiers.keys, rules.failed)
            async with (
                beside(announce, name="announcing", on_failure="restart", failed=rules.failed),
                _membership(config, channels, neighbours, store=store, failed=rules.failed),
            ):
                await server.set_serving(True)
                served = KvStore(store, places, address=address, events=events, metrics=metrics)
                metrics.watch(served.figures, lambda: places.elsewhere.faults, served.device_figures)
                try:
                    yield served
                finally:
                    await store.stop()


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


@asynccontextmanager
async def _open_tiers(
    config: KvStoreConfig, sessions: SessionTable, rules: Rules, open_device: OpenDevice
) -> AsyncIterator[OpenTiers]:
    """The tiers of `config`. They close in the opposite order: other stores, the device, the disk, host memory."""
    tiers, disk, gpu = Tiers(), None, None
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(config, tiers, rules))
        reports: dict[TierKind, Callable[[], Mapping[str, Any]]] = {TierKind.HOST: host.figures}
        if config.nvme_dir is not None:
            opening = open_disk(config, config.nvme_dir, host, sessions=sessions, tiers=tiers, rules=rules)
            disk = await stack.enter_async_context(opening)
            reports[TierKind.NVME] = disk.figures
        if config.gpu_bytes:
            gpu = await stack.enter_async_context(
                open_device_tier(config, host, sessions, tiers=tiers, rules=rules, open_device=open_device)
            )
            reports[TierKind.GPU] = gpu.figures
        elsewhere = await stack.enter_async_context(open_elsewhere(config, host, tiers=tiers, rules=rules))
        reports[TierKind.REMOTE] = elsewhere.figures
        yield OpenTiers(tiers=tiers, host=host, elsewhere=elsewhere, disk=disk, gpu=gpu, reports=reports)


def _no_device() -> Mapping[str, Any]:
    return asdict(GpuStats())


def _face(places: OpenTiers, rules: Rules) -> NoDeviceFace:
    """The device as clients meet it."""
    return DeviceFace(DeviceReaders(places.gpu.blocks, rules.now)) if places.gpu else NoDeviceFace()


@asynccontextmanager
async def _membership(
    config: KvStoreConfig, channels: Channels, neighbours: Neighbours, *, store: Store, failed: Failed
) -> AsyncIterator[None]:
    """The store is a member of the mesh, when there are routers to join."""
    if not config.router:
        yield
        return
    member = StoreMembership(
        [channels.to(router) for router in config.router],
        neighbours.own,
        store.tiers.hub,
        host_id=config.host_id,
        others=neighbours.set_joined,
        heard=partial(_hear, store),
    )
    async with beside(member.run, name="membership", on_failure="restart", failed=failed):
        yield


@asynccontextmanager
async def _publishing(config: KvStoreConfig, tiers: Tiers, failed: Failed) -> AsyncIterator[Publisher | None]:
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
        with tiers.hub.subscribe() as subscriber:
            follow = partial(publisher.follow, subscriber, Translator(partial(_held, tiers), partial(_tokens, tiers)))
            async with beside(follow, name="block events", on_failure="restart", failed=failed) as following:
                try:
                    yield publisher
                finally:
                    tiers.hub.close()
                    await following.ended()  # the last events go out before the sockets close


def _held(tiers: Tiers, key: bytes) -> Held | None:
    """Finds the block of `key`, for the events."""
    found = tiers.find(key)
    if found is None:
        return None
    kind, block = found
    return Held(key, block.parent, block.first_token, _MEDIA[kind])


def _tokens(tiers: Tiers) -> int:
    """Tokens per block; 0: nothing is known yet."""
    return next((tier.spec.block_size for tier in tiers.kept if tier.spec is not None), 0)


def _hear(store: Store, hint: common_pb2.SessionHint) -> None:
    hear(store.sessions, hint, store.now())


def _register(
    store: Store, places: OpenTiers, device: NoDeviceFace, config: KvStoreConfig, server: grpc.aio.Server
) -> None:
    servicer = Servicer(store, places.elsewhere, device, config, reports=places.reports)
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(servicer, server)
    bulk.serve_read(server, servicer.Read)
