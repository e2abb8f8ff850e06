"""The KV store's gRPC face: checks and translates messages, and delegates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
import structlog

from penstock.errors import InvalidRequest
from penstock.kv.bytes import bulk
from penstock.kv.bytes.pieces import packed
from penstock.kv.device.cuda import open_cuda
from penstock.kv.spec import spec_from_message
from penstock.kvstore.checks import (
    check_count,
    check_key,
    check_keys,
    check_length,
    check_name,
    check_namespace,
    check_seconds,
    check_session,
    check_sources,
    check_spec,
    lease_seconds,
)
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.elsewhere.mooncake import open_pool
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.pulling import Puller
from penstock.kvstore.elsewhere.transport.over_grpc import open_grpc_transport
from penstock.kvstore.events.membership import Member
from penstock.kvstore.events.wire.publisher import Publisher, Translator, WireOptions, open_publisher
from penstock.kvstore.keeper import Keeper
from penstock.kvstore.messages import (
    events_message,
    hear,
    lease_message,
    stats_message,
    wanted_from_message,
    written_from_message,
)
from penstock.kvstore.table.blocks import Reserved, ReserveState, TableStats
from penstock.kvstore.tiers.base import Supplier
from penstock.kvstore.tiers.device.messages import DeviceFace
from penstock.kvstore.tiers.device.opening import OpenDevice, open_gpu
from penstock.kvstore.tiers.device.tier import NO_GPU, GpuTier
from penstock.kvstore.writer import Writer
from penstock.rpc.channels import open_channels
from penstock.rpc.server import serve
from penstock.runtime.metrics import StoreMetrics
from penstock.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name
_GRACE_S = 2.0
_DISK_PATIENCE_S = 0.5
"""How long a client's attachment waits for the disk's index; it has to be short beside the client's own limit."""
_SHARE_FOR_BRINGING = 0.5
"""Of the time that a client gives a lease: it still has to read the blocks."""
_LONGEST_WAIT_S = 60.0
_STATE = {
    ReserveState.WRITE: kvstore_pb2.Reservation.STATE_WRITE,
    ReserveState.EXISTS: kvstore_pb2.Reservation.STATE_EXISTS,
    ReserveState.FULL: kvstore_pb2.Reservation.STATE_FULL,
}

Context = grpc.aio.ServicerContext[Any, Any]


class KvStore:
    """A running store. Made by `open_kvstore`."""

    def __init__(
        self, keeper: Keeper, puller: Puller, gpu: GpuTier | None, address: str, events: Publisher | None
    ) -> None:
        self.keeper = keeper
        self.puller = puller
        self.gpu = gpu
        """The tier on a device, when there is one."""
        self.address = address
        self.events = events
        self.metrics = StoreMetrics(
            lambda: {**keeper.figures(), **puller.figures()},
            lambda: puller.faults,
            lambda: asdict(gpu.stats() if gpu else NO_GPU),
        )

    @property
    def suppliers(self) -> list[Supplier]:
        """What is asked, in this order, for blocks that are not in host memory."""
        return self.keeper.suppliers

    def stats(self) -> TableStats:
        """The table's figures."""
        return self.keeper.stats()


@asynccontextmanager
async def open_kvstore(config: KvStoreConfig, open_device: OpenDevice = open_cuda) -> AsyncIterator[KvStore]:
    """Serves until the block ends, then: attachments and subscriptions end, calls drain, the memory is freed.

    Raises ConfigError. `open_device` is for tests: another kind of device.
    """
    keeper = Keeper(config)
    try:
        await keeper.open()
        async with (
            open_gpu(keeper, config, open_device) as gpu,
            open_channels() as channels,
            _pulling(keeper, config) as puller,
            _publishing(keeper, config) as events,
            serve(config.address, partial(_register, keeper, puller, gpu, config), [_NAME], grace=_GRACE_S) as server,
        ):
            address = f"{config.address.rpartition(':')[0]}:{server.port}"
            neighbours = puller.neighbours
            neighbours.own = config.advertise or address
            jobs = [keeper.run(), neighbours.announce(keeper.hub, keeper.all_keys)]
            if config.router is not None:
                channel = channels.to(config.router)
                heard = partial(_hear, keeper)
                jobs.append(
                    Member(channel, neighbours.own, config.host_id, keeper.hub, neighbours.set_joined, heard).run()
                )
            background = [asyncio.create_task(job) for job in jobs]  # awaited below; a group would wrap errors
            for task in background:
                task.add_done_callback(_tell_of_failure)
            await server.set_serving(True)
            try:
                yield KvStore(keeper, puller, gpu, address, events)
            finally:
                keeper.stop()
                await keeper.settle()
                await _end(background)
    finally:
        await keeper.close()


@asynccontextmanager
async def _publishing(keeper: Keeper, config: KvStoreConfig) -> AsyncIterator[Publisher | None]:
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
    async with open_publisher(options) as publisher:
        with keeper.hub.subscribe() as subscriber:
            following = asyncio.create_task(publisher.follow(subscriber, Translator(keeper.held, keeper.block_size)))
            try:
                yield publisher
            finally:
                keeper.hub.close()  # the last events go out before the sockets close
                await _end([following])


def _hear(keeper: Keeper, hint: common_pb2.SessionHint) -> None:
    hear(keeper.sessions, hint, keeper.now())


@asynccontextmanager
async def _pulling(keeper: Keeper, config: KvStoreConfig) -> AsyncIterator[Puller]:
    """What gets blocks from other stores."""
    async with (
        open_channels() as channels,
        open_grpc_transport(f"store of {config.host_id}", stall_s=config.stall_s) as transport,
        open_pool(keeper, config) as pool,
    ):
        yield Puller(Neighbours(config.peers, channels, max_keys=config.home_keys), transport, pool)


def _tell_of_failure(task: asyncio.Task[None]) -> None:
    """At once, since the store goes on without it, and `_end` raises only when that is over."""
    if not task.cancelled() and (error := task.exception()) is not None:
        structlog.get_logger("penstock.kvstore").error("a part of the store has failed", exc_info=error)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _register(
    keeper: Keeper, puller: Puller, gpu: GpuTier | None, config: KvStoreConfig, server: grpc.aio.Server
) -> None:
    servicer = Servicer(keeper, puller, gpu, config)
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(servicer, server)
    bulk.serve_read(server, servicer.Read)


class Servicer(kvstore_pb2_grpc.KvStoreServicer):
    """One method per rpc; see the proto for their contracts."""

    def __init__(self, keeper: Keeper, puller: Puller, gpu: GpuTier | None, config: KvStoreConfig) -> None:
        self._keeper = keeper
        self._puller = puller
        self._device = DeviceFace(gpu)
        self._config = config

    async def Attach(
        self, request: kvstore_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.AttachResponse]:
        check_name("client", request.client)
        check_name("device", request.device)
        spec = spec_from_message(request.spec)
        check_spec(spec)
        attachment_id = self._keeper.attach(request.client, spec, peer=request.peer)
        try:
            if self._keeper.disk is not None:  # a worker's first question should find what an earlier life has left
                await self._keeper.disk.tier.settled(_DISK_PATIENCE_S)
            yield self._attached(attachment_id, self._device.attach(attachment_id, request))
            await self._keeper.closing.wait()
        finally:
            self._device.detach(attachment_id)
            self._keeper.detach(attachment_id, request.client)

    def _attached(self, attachment_id: str, device: kvstore_pb2.DeviceMemory | None) -> kvstore_pb2.AttachResponse:
        arena = self._keeper.arena
        return kvstore_pb2.AttachResponse(
            attachment_id=attachment_id,
            host_id=self._config.host_id,
            arena_path=arena.path,
            arena_bytes=arena.size,
            lease_s=self._config.lease_s,
            arena_id=arena.arena_id,
            epochs_at=arena.layout.epochs_at,
            slots_at=arena.layout.slots_at,
            slot_stride=arena.layout.stride,
            slots=arena.layout.slots,
            device=device,
        )

    async def Lookup(self, request: kvstore_pb2.LookupRequest, context: Context) -> kvstore_pb2.LookupResponse:
        return kvstore_pb2.LookupResponse(found=self._keeper.lookup(check_keys(request.keys)))

    async def Lease(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseResponse:
        keys = check_keys(request.keys)
        check_session(request.session)
        seconds = lease_seconds(request.lease_s, self._config.lease_s)
        remaining = context.time_remaining()
        wait_s = _LONGEST_WAIT_S if remaining is None else remaining * _SHARE_FOR_BRINGING
        self._keeper.sessions.used(request.session, self._keeper.now())
        with self._device.leasing(request, keys, seconds) as on_device:
            rest, lease = keys[len(on_device.offsets) if on_device else 0 :], None
            if rest or on_device is None:
                lease = await self._keeper.lease(
                    request.attachment_id, rest, seconds, wait_s, request.session, self._elsewhere(request)
                )
        self._device.used(lease)
        if lease is None:
            return kvstore_pb2.LeaseResponse(device=on_device)
        message = lease_message(lease, self._keeper.arena.layout, self._keeper.store.block_bytes, peer=request.peer)
        if on_device is not None:
            message.device.CopyFrom(on_device)
        return message

    def _elsewhere(self, request: kvstore_pb2.LeaseRequest) -> list[Supplier]:
        """Other stores, unless one of them asks: nobody is sent round in a circle."""
        check_sources(request.sources)
        spec = self._keeper.spec
        if request.peer or spec is None or not self._puller.anywhere:
            return []
        return [self._puller.supplier(spec, request.sources, request.session)]

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Context) -> kvstore_pb2.ReleaseResponse:
        check_count("lease_ids", request.lease_ids)
        released = self._keeper.store.leases.release(request.attachment_id, request.lease_ids, self._keeper.now())
        return kvstore_pb2.ReleaseResponse(released=released, device_released=self._device.release(request))

    async def Reserve(self, request: kvstore_pb2.ReserveRequest, context: Context) -> kvstore_pb2.ReserveResponse:
        check_count("blocks", request.blocks)
        store = self._keeper.store
        check_length(request.length, store.block_bytes)
        wanted = wanted_from_message(request)
        reserved = store.puts.reserve(request.attachment_id, wanted, self._keeper.now())
        return kvstore_pb2.ReserveResponse(
            blocks=[self._answer(one) for one in reserved], reserve_s=store.puts.reserve_s
        )

    def _answer(self, reserved: Reserved) -> kvstore_pb2.Reservation:
        if reserved.block is None:
            return kvstore_pb2.Reservation(state=_STATE[reserved.state])
        offset = self._keeper.arena.layout.offset(reserved.block.slot)
        return kvstore_pb2.Reservation(state=_STATE[reserved.state], offset=offset, epoch=reserved.block.epoch)

    async def Commit(self, request: kvstore_pb2.CommitRequest, context: Context) -> kvstore_pb2.CommitResponse:
        check_count("blocks", request.blocks)
        written = [written_from_message(f"blocks[{index}]", block) for index, block in enumerate(request.blocks)]
        committed = self._keeper.store.puts.commit(request.attachment_id, written, self._keeper.now())
        return kvstore_pb2.CommitResponse(committed=committed)

    async def Quarantine(
        self, request: kvstore_pb2.QuarantineRequest, context: Context
    ) -> kvstore_pb2.QuarantineResponse:
        check_key("key", request.key)
        store = self._keeper.store
        removed = store.quarantine(request.attachment_id, request.key, request.epoch, self._keeper.now())
        return kvstore_pb2.QuarantineResponse(removed=removed or self._device.quarantine(request))

    async def Retain(self, request: kvstore_pb2.RetainRequest, context: Context) -> kvstore_pb2.RetainResponse:
        check_keys(request.keys)
        check_namespace(request.namespace)
        check_seconds("ttl_s", request.ttl_s)
        if not request.namespace:
            raise InvalidRequest("namespace is empty; a promise is made to a tenant", field="namespace")
        grant = self._keeper.retain(request.attachment_id, request.keys, request.ttl_s, request.namespace)
        return kvstore_pb2.RetainResponse(granted_s=grant.seconds, blocks=grant.blocks)

    async def Hint(self, request: common_pb2.HintRequest, context: Context) -> common_pb2.HintResponse:
        check_count("hints", request.hints)
        for hint in request.hints:
            _hear(self._keeper, hint)
        return common_pb2.HintResponse()

    async def Read(  # type: ignore[override]  # yields messages that are encoded already
        self, request: kvstore_pb2.ReadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        check_count("indices", request.indices)
        store, arena = self._keeper.store, self._keeper.arena
        if request.at >= store.block_bytes:
            raise InvalidRequest(f"at is {request.at}, a block has {store.block_bytes} bytes", field="at")
        sent = request.at
        for ranges in packed(request.indices, store.block_bytes, request.at):
            lease = store.leases.find(request.attachment_id, request.lease_id, self._keeper.now())
            pieces = []
            for index, at, length in ranges:
                if index >= len(lease.blocks):
                    raise InvalidRequest(f"the lease has {len(lease.blocks)} blocks, not {index + 1}", field="indices")
                pieces.append(arena.block(lease.blocks[index].slot, store.block_bytes)[at : at + length])
            message = bulk.encode(sent, pieces)
            sent += sum(length for _, _, length in ranges)
            del pieces
            yield message

    async def Write(
        self, request_iterator: AsyncIterator[kvstore_pb2.BlockChunks], context: Context
    ) -> kvstore_pb2.CommitResponse:
        writer = Writer(self._keeper)
        async for message in request_iterator:
            for chunk in message.chunks:
                if chunk.HasField("block"):
                    writer.begin(chunk.attachment_id, written_from_message("block", chunk.block))
                writer.add(chunk.at, chunk.data)
        return kvstore_pb2.CommitResponse(committed=writer.finish())

    async def Events(
        self, request: kvstore_pb2.EventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.BlockEvents]:
        with self._keeper.hub.subscribe() as subscriber:
            while (change := await subscriber.next()) is not None:
                yield events_message(change)

    async def Announce(self, request: kvstore_pb2.AnnounceRequest, context: Context) -> kvstore_pb2.AnnounceResponse:
        check_name("address", request.address)
        check_keys(request.stored, "stored")
        check_keys(request.removed, "removed")
        self._puller.neighbours.heard(request.address, request.stored, request.removed)
        return kvstore_pb2.AnnounceResponse()

    async def WhoHas(self, request: kvstore_pb2.WhoHasRequest, context: Context) -> kvstore_pb2.WhoHasResponse:
        check_key("key", request.key)
        neighbours = self._puller.neighbours
        mine = [neighbours.own] if self._keeper.tier_of(request.key) else []
        return kvstore_pb2.WhoHasResponse(
            addresses=[*mine, *neighbours.directory.holders(request.key, neighbours.others)]
        )

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: Context) -> kvstore_pb2.StatsResponse:
        return stats_message(self._keeper, self._puller, self._config.host_id, self._device.stats())
