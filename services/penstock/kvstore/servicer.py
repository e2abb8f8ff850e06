"""The KV store's rpcs: each checks and translates its messages, and delegates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from penstock.errors import InvalidRequest, Overloaded
from penstock.kv.bounds import check_key, check_keys, check_namespace, keys_of
from penstock.kv.bytes import bulk
from penstock.kv.bytes.pieces import packed
from penstock.kv.events import EventHub
from penstock.kv.identity import MAX_BATCH, MAX_KEYS
from penstock.kv.spec import spec_from_message
from penstock.kvstore.checks import (
    check_block_length,
    check_ranges,
    check_short_name,
    check_sources,
    check_spec,
    lease_seconds,
)
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.elsewhere.awaiting import WAITS
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.events.messages import events_message
from penstock.kvstore.messages import (
    Reports,
    hear,
    lease_message,
    lent_from_message,
    pace_from_message,
    pages_from_message,
    stats_message,
    touched_from_message,
    wanted_from_message,
    written_from_message,
)
from penstock.kvstore.partitions import Partition, Partitions
from penstock.kvstore.receiving import BlockReceiver
from penstock.kvstore.sessions import SessionTable
from penstock.kvstore.store import Store
from penstock.kvstore.table.blocks import Reserved, ReserveState, TierKind
from penstock.kvstore.tiers.base import Wish
from penstock.rpc.bounds import check_count, check_seconds, check_session
from penstock.runtime.tasks import first_of
from penstock.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

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


_MOST_LISTENERS = 16
"""Streams of Events: each has a copy of all keys, and one of the places for calls."""


class Servicer(kvstore_pb2_grpc.KvStoreServicer):
    """One method per rpc; see the proto for their contracts."""

    def __init__(
        self,
        partitions: Partitions,
        sessions: SessionTable,
        hub: EventHub[TierKind],
        neighbours: Neighbours,
        *,
        config: KvStoreConfig,
        reports: Reports,
        now: Callable[[], float],
    ) -> None:
        self._parts = partitions
        self._sessions = sessions
        self._hub = hub
        self._listening = 0
        """Streams of Events."""
        self._neighbours = neighbours
        self._config = config
        self._reports = reports
        self._now = now

    async def Attach(
        self, request: kvstore_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.AttachResponse]:
        check_short_name("client", request.client)
        check_short_name("device", request.device)
        spec = spec_from_message(request.spec)
        check_spec(spec)
        attachment_id, part = self._parts.attach(request.client, spec, peer=request.peer, draft=request.draft)
        try:
            # The first question should find what an earlier life has left.
            await first_of(part.store.tiers.settled(_DISK_PATIENCE_S), part.store.closing.wait())
            yield self._attached(part, attachment_id, part.device.attach(attachment_id, request))
            await part.store.closing.wait()
        finally:
            self._parts.detach(attachment_id, request.client)

    def _attached(
        self, part: Partition, attachment_id: str, device: kvstore_pb2.DeviceMemory | None
    ) -> kvstore_pb2.AttachResponse:
        arena = part.host.arena
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
            ranges=True,
            device=device,
        )

    async def Lookup(self, request: kvstore_pb2.LookupRequest, context: Context) -> kvstore_pb2.LookupResponse:
        return kvstore_pb2.LookupResponse(found=self._parts.lookup(check_keys("keys", request.keys)))

    async def Lease(self, request: kvstore_pb2.LeaseRequest, context: Context) -> kvstore_pb2.LeaseResponse:
        part = self._parts.of(request.attachment_id)
        keys = check_keys("keys", request.keys)
        check_session("session", request.session)
        check_sources(request.sources)
        check_namespace("namespace", request.namespace)
        wish = Wish(request.session, request.sources, request.peer, request.namespace)
        seconds = lease_seconds(request.lease_s, self._config.lease_s)
        remaining = context.time_remaining()
        wait_s = _LONGEST_WAIT_S if remaining is None else remaining * _SHARE_FOR_BRINGING
        check_seconds("wait_s", request.wait_s)
        wait_s = min(wait_s, request.wait_s or wait_s)
        self._sessions.used(request.session, self._now())
        with part.device.leasing(request, keys, seconds) as on_device:
            rest, lease = keys[len(on_device.offsets) if on_device else 0 :], None
            if rest or on_device is None:
                lease = await part.store.lease(request.attachment_id, rest, wish, seconds=seconds, wait_s=wait_s)
        if on_device is not None:
            part.store.blocks_used(keys[: len(on_device.offsets)])
        if lease is None:
            return kvstore_pb2.LeaseResponse(device=on_device)
        message = lease_message(lease, part.host.arena.layout, part.host.table.block_bytes, peer=request.peer)
        if on_device is not None:
            message.device.CopyFrom(on_device)
        return message

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Context) -> kvstore_pb2.ReleaseResponse:
        part = self._parts.of(request.attachment_id)
        check_count("lease_ids", request.lease_ids, MAX_KEYS)
        released = part.host.table.leases.release(request.attachment_id, request.lease_ids, self._now())
        return kvstore_pb2.ReleaseResponse(released=released, device_released=part.device.release(request))

    async def Reserve(self, request: kvstore_pb2.ReserveRequest, context: Context) -> kvstore_pb2.ReserveResponse:
        part = self._parts.of(request.attachment_id)
        check_count("blocks", request.blocks, MAX_BATCH)
        table = part.host.table
        check_block_length(request.length, table.block_bytes)
        wanted = wanted_from_message(request)
        await asyncio.sleep(0)  # each part of the largest question may take ten milliseconds
        reserved = table.puts.reserve(request.attachment_id, wanted, self._now())
        await asyncio.sleep(0)
        return kvstore_pb2.ReserveResponse(
            blocks=[self._answer(part, one) for one in reserved], reserve_s=table.puts.reserve_s
        )

    def _answer(self, part: Partition, reserved: Reserved) -> kvstore_pb2.Reservation:
        if reserved.block is None:
            return kvstore_pb2.Reservation(state=_STATE[reserved.state])
        offset = part.host.arena.layout.offset(reserved.block.slot)
        return kvstore_pb2.Reservation(state=_STATE[reserved.state], offset=offset, epoch=reserved.block.epoch)

    async def Commit(self, request: kvstore_pb2.CommitRequest, context: Context) -> kvstore_pb2.CommitResponse:
        part = self._parts.of(request.attachment_id)
        check_count("blocks", request.blocks, MAX_BATCH)
        written = [written_from_message(f"blocks[{index}]", block) for index, block in enumerate(request.blocks)]
        committed = part.host.table.puts.commit(request.attachment_id, written, self._now())
        return kvstore_pb2.CommitResponse(committed=committed)

    async def Lend(self, request: kvstore_pb2.LendRequest, context: Context) -> kvstore_pb2.LendResponse:
        part = self._parts.of(request.attachment_id)
        check_count("blocks", request.blocks, MAX_BATCH)
        blocks, ended = lent_from_message(request), keys_of("ended", request.ended, most=MAX_BATCH)
        if request.HasField("pages"):
            refused = part.store.show_pages(request.attachment_id, pages_from_message(request.pages))
            if refused:
                return kvstore_pb2.LendResponse(refused=refused)
        await part.store.lend(request.attachment_id, blocks, ended)
        return kvstore_pb2.LendResponse()

    async def Save(self, request: kvstore_pb2.SaveRequest, context: Context) -> kvstore_pb2.SaveResponse:
        part = self._parts.of(request.attachment_id)
        keys = keys_of("keys", request.keys, most=MAX_BATCH)
        return kvstore_pb2.SaveResponse(saved=await part.store.save(request.attachment_id, keys))

    async def Quarantine(
        self, request: kvstore_pb2.QuarantineRequest, context: Context
    ) -> kvstore_pb2.QuarantineResponse:
        part = self._parts.of(request.attachment_id)
        check_key("key", request.key)
        table = part.host.table
        removed = table.quarantine(request.attachment_id, request.key, request.epoch, self._now())
        return kvstore_pb2.QuarantineResponse(removed=removed or part.device.quarantine(request))

    async def Retain(self, request: kvstore_pb2.RetainRequest, context: Context) -> kvstore_pb2.RetainResponse:
        part = self._parts.of(request.attachment_id)
        check_keys("keys", request.keys)
        check_namespace("namespace", request.namespace)
        check_seconds("ttl_s", request.ttl_s)
        if not request.namespace:
            raise InvalidRequest("namespace is empty; a promise is made to a tenant", field="namespace")
        grant = await part.store.promise(request.attachment_id, request.keys, request.ttl_s, request.namespace)
        return kvstore_pb2.RetainResponse(granted_s=grant.seconds, blocks=grant.blocks)

    async def Hint(self, request: common_pb2.HintRequest, context: Context) -> common_pb2.HintResponse:
        check_count("hints", request.hints, MAX_KEYS)
        for hint in request.hints:
            hear(self._sessions, hint, self._now())
        return common_pb2.HintResponse()

    async def Touch(self, request: kvstore_pb2.TouchRequest, context: Context) -> kvstore_pb2.TouchResponse:
        part = self._parts.of(request.attachment_id)
        used = touched_from_message(request)
        absent = [part.store.touch(request.attachment_id, keys, session) for session, keys in used]
        return kvstore_pb2.TouchResponse(absent=b"".join(key for keys in absent for key in keys))

    async def Claim(self, request: kvstore_pb2.ClaimRequest, context: Context) -> kvstore_pb2.ClaimResponse:
        keys, pace = check_keys("keys", request.keys), pace_from_message("pace", request.pace)
        check_sources(request.sources)
        if request.peer:
            waited = await self._parts.concerned(keys).desk.wait(keys, pace)
        else:
            waited = await self._parts.of(request.attachment_id).desk.claim(
                request.attachment_id, request.number, keys, pace, sources=list(request.sources)
            )
        return kvstore_pb2.ClaimResponse(found=waited.found, wait=WAITS[waited.end])

    async def Withdraw(self, request: kvstore_pb2.WithdrawRequest, context: Context) -> kvstore_pb2.WithdrawResponse:
        part = self._parts.of(request.attachment_id)
        check_count("numbers", request.numbers, MAX_KEYS)
        part.host.table.attachments.of(request.attachment_id)
        for number in request.numbers:
            part.store.claims.withdraw(request.attachment_id, number)
        return kvstore_pb2.WithdrawResponse()

    async def Read(  # type: ignore[override]  # yields messages that are encoded already
        self, request: kvstore_pb2.ReadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        part = self._parts.of(request.attachment_id)
        check_count("indices", request.indices, MAX_KEYS)
        table, arena = part.host.table, part.host.arena
        parts = [(one.begin, one.end) for one in request.ranges]
        check_ranges(parts, table.block_bytes)
        parts = parts or [(0, table.block_bytes)]
        wanted = sum(end - begin for begin, end in parts)
        if request.at >= wanted:
            raise InvalidRequest(f"at is {request.at}, of a block {wanted} bytes are wanted", field="at")
        sent = request.at
        for ranges in packed(request.indices, table.block_bytes, request.at, parts):
            lease = table.leases.find(request.attachment_id, request.lease_id, self._now())
            pieces = []
            for index, at, length in ranges:
                if index >= len(lease.blocks):
                    raise InvalidRequest(f"the lease has {len(lease.blocks)} blocks, not {index + 1}", field="indices")
                pieces.append(arena.block(lease.blocks[index].slot, table.block_bytes)[at : at + length])
            message = bulk.encode(sent, pieces)
            sent += sum(length for _, _, length in ranges)
            del pieces
            yield message

    async def Write(
        self, request_iterator: AsyncIterator[kvstore_pb2.BlockChunks], context: Context
    ) -> kvstore_pb2.CommitResponse:
        writer = BlockReceiver(self._store_of)
        async for message in request_iterator:
            for chunk in message.chunks:
                if chunk.HasField("block"):
                    writer.begin(chunk.attachment_id, written_from_message("block", chunk.block))
                writer.add(chunk.at, chunk.data)
        return kvstore_pb2.CommitResponse(committed=writer.finish())

    async def Events(
        self, request: kvstore_pb2.EventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.BlockEvents]:
        if self._listening == _MOST_LISTENERS:
            raise Overloaded(f"{_MOST_LISTENERS} others hear the store's events already", retry_after=1)
        self._listening += 1
        try:
            with self._hub.subscribe() as subscriber:
                while (change := await subscriber.next()) is not None:
                    yield events_message(change)
        finally:
            self._listening -= 1

    async def Announce(self, request: kvstore_pb2.AnnounceRequest, context: Context) -> kvstore_pb2.AnnounceResponse:
        check_short_name("address", request.address)
        check_keys("stored", request.stored)
        check_keys("removed", request.removed)
        self._neighbours.heard(request.address, request.stored, request.removed)
        return kvstore_pb2.AnnounceResponse()

    async def WhoHas(self, request: kvstore_pb2.WhoHasRequest, context: Context) -> kvstore_pb2.WhoHasResponse:
        check_key("key", request.key)
        neighbours = self._neighbours
        mine = [neighbours.own] if self._parts.find(request.key) else []
        return kvstore_pb2.WhoHasResponse(
            addresses=[*mine, *neighbours.directory.holders(request.key, neighbours.others)]
        )

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: Context) -> kvstore_pb2.StatsResponse:
        return stats_message(self._parts, self._reports, host_id=self._config.host_id, sessions=len(self._sessions))

    def _store_of(self, attachment_id: str) -> Store:
        return self._parts.of(attachment_id).store
