"""Blocks over gRPC, from the store that has them: attach, lease, read in chunks of at most 1 MiB.

A stream that breaks or stalls is taken up again on a fresh connection, from the first byte that is missing, a bounded
number of times.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
import xxhash

from penstock.kv.bytes import bulk
from penstock.kv.bytes.checksum import CHECKSUM_BYTES
from penstock.kv.bytes.pieces import split
from penstock.kv.identity import MAX_KEYS
from penstock.kv.spec import KvSpec
from penstock.kvstore.elsewhere.transport.base import Landing, Offered, Reason, TransportFault, TransportStats
from penstock.kvstore.elsewhere.transport.peers import Broken, Peer, Peers
from penstock.rpc.context import outgoing
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.tasks import Failed
from penstock.v1 import kvstore_pb2

_BATCH_BYTES = 64 << 20
"""Room asked for at once; also what one lease at the peer covers."""
_ATTEMPTS = 4
"""In a row without a byte received."""
_FIRST_PAUSE_S = 0.02
_STALL_S = 1.0
_IDLE_S = 5.0
_LEASE_S = 30.0


@dataclass(slots=True)
class _Place:
    """Where one offered block goes, and how much of it is there."""

    offered: Offered
    view: memoryview | None
    at: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)

    def let_go(self) -> None:
        """The buffer is its owner's again."""
        if self.view is not None:
            self.view.release()
            self.view = None


class GrpcTransport:
    """Made by `open_grpc_transport`; used from its event loop."""

    def __init__(
        self,
        name: str,
        failed: Failed,
        *,
        member: MemberIdentity | None = None,
        stall_s: float = _STALL_S,
        idle_s: float = _IDLE_S,
    ) -> None:
        """`name` is for the peers' logs; `member` is who this store is to them; `stall_s` is the longest wait for a
        sign of life."""
        self.stats = TransportStats()
        self.peers = Peers(name, stall_s, idle_s, failed, member)
        self._log = structlog.get_logger("penstock.kv").bind(transport="grpc")

    async def fetch(self, peer: str, spec: KvSpec, keys: Sequence[bytes], landing: Landing, until: float) -> None:
        """Leases and streams the leading blocks of `peer` in batches; resumes broken streams. Raises TransportFault."""
        batch = max(1, min(MAX_KEYS, _BATCH_BYTES // spec.block_bytes))
        begin = time.monotonic()
        try:
            for start in range(0, len(keys), batch):
                fetch = _Fetch(self.peers, self.stats, peer, spec, keys[start : start + batch], landing, until)
                if not await fetch.run():
                    return
        except TransportFault as fault:
            self.stats.faults[fault.reason] += 1
            self._log.info("a fetch ended early", peer=peer, reason=str(fault))
            raise
        finally:
            self.stats.seconds += time.monotonic() - begin


@dataclass(eq=False)
class _Fetch:
    """One batch: one lease at a time, as many streams as it takes."""

    peers: Peers
    stats: TransportStats
    address: str
    spec: KvSpec
    keys: Sequence[bytes]
    landing: Landing
    until: float
    places: list[_Place] | None = None
    next: int = 0
    """First place that is not complete."""
    more: bool = False
    fresh: int = 0
    """Bytes that arrived since the last break."""

    async def run(self) -> bool:
        """Whether everything asked for is there, so that a next batch is worth a try."""
        failures, pause = 0, _FIRST_PAUSE_S
        try:
            while True:
                try:
                    await self._once()
                    return self.more
                except Broken as broken:
                    failures = 1 if self.fresh else failures + 1
                    pause = _FIRST_PAUSE_S if self.fresh else pause * 2
                    self.stats.bytes_resumed += self.fresh
                    self.stats.resumptions += bool(self.fresh)
                    self.fresh = 0
                    if failures >= _ATTEMPTS or self.until - time.monotonic() <= pause:
                        reason: Reason = broken.reason if self.places is not None else "unreachable"
                        raise TransportFault(reason, str(broken)) from broken
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        finally:
            for place in self.places or ():
                place.let_go()

    async def _once(self) -> None:
        async with self.peers.attachment(self.address, self.spec, self.until) as peer:
            lease = await self._lease(peer)
            try:
                places = self._place(lease)
                indices = [index for index in range(self.next, len(places)) if places[index].view is not None]
                if indices:
                    await self._read(peer, lease, places, indices)
            finally:
                if lease.lease_id:
                    request = kvstore_pb2.ReleaseRequest(attachment_id=peer.attachment_id, lease_ids=[lease.lease_id])
                    self.peers.tell(peer, peer.stub.Release, request)

    async def _lease(self, peer: Peer) -> kvstore_pb2.LeaseResponse:
        """For the blocks from `next` on."""
        request = kvstore_pb2.LeaseRequest(
            attachment_id=peer.attachment_id,
            keys=self.keys[self.next :],
            lease_s=min(_LEASE_S, max(0.1, self.until - time.monotonic())),
            peer=True,
        )
        response: kvstore_pb2.LeaseResponse = await self.peers.call(peer, peer.stub.Lease, request, self.until)
        count = len(response.epochs)
        lengths = {len(response.about), len(response.namespaces), len(response.checksums) // CHECKSUM_BYTES}
        if lengths != {count} or count > len(request.keys) or (count and response.length != self.spec.block_bytes):
            raise TransportFault("nonsense", "a lease that does not fit the question")
        return response

    def _place(self, lease: kvstore_pb2.LeaseResponse) -> list[_Place]:
        """The places of the leased blocks; those known already keep what they hold of the same bytes."""
        offered = [
            Offered(key, about.parent, about.first_token, checksum, about.seconds, namespace)
            for key, about, checksum, namespace in zip(
                self.keys[self.next :],
                lease.about,
                split(lease.checksums, CHECKSUM_BYTES),
                lease.namespaces,
                strict=False,
            )
        ]
        if self.places is None:
            views = self.landing.room(offered)
            self.more = len(views) == len(self.keys)
            self.places = [_Place(one, view) for one, view in zip(offered, views, strict=False)]
            return self.places
        gone = self.places[self.next + len(offered) :]
        if gone:
            self.more = False
            for place in gone:
                place.let_go()
            del self.places[self.next + len(offered) :]
        for place, one in zip(self.places[self.next :], offered, strict=False):
            if place.offered.checksum != one.checksum:  # computed again, and not the same bit for bit
                place.at = 0
                place.digest.reset()
            place.offered = one
        return self.places

    async def _read(
        self, peer: Peer, lease: kvstore_pb2.LeaseResponse, places: list[_Place], indices: list[int]
    ) -> None:
        base = self.next
        request = kvstore_pb2.ReadRequest(
            attachment_id=peer.attachment_id,
            lease_id=lease.lease_id,
            indices=[index - base for index in indices],
            at=places[indices[0]].at,
        )
        call = peer.read(request, timeout=max(0.001, self.until - time.monotonic()), metadata=outgoing())
        at, rest = request.at, memoryview(b"")
        try:
            for index in indices:
                place = places[index]
                while place.at < self.spec.block_bytes:
                    if not rest:
                        at, rest = await self._part(call, at)
                    rest = self._add(place, rest)
                await self._check(peer, place, lease.epochs[index - base])
                self.next = index + 1
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            if time.monotonic() >= self.until:
                raise TransportFault("late", "the time is over") from error
            self.peers.failed(peer, error)
        finally:
            call.cancel()

    async def _part(self, call: Any, at: int) -> tuple[int, memoryview]:
        """The next bytes of the stream, which must begin at `at`, and where they end."""
        async with asyncio.timeout(self.peers.patience(self.until)):
            message = await call.read()
        if message is grpc.aio.EOF:
            raise Broken("the stream ended too early")
        try:
            begin, data = bulk.decode(message)
        except ValueError as error:
            raise TransportFault("nonsense", str(error)) from error
        if begin != at or not data:
            raise TransportFault("nonsense", f"{len(data)} bytes at {begin} instead of {at}")
        return at + len(data), data

    def _add(self, place: _Place, data: memoryview) -> memoryview:
        """Puts as many of the bytes in their place as belong there; returns the rest."""
        assert place.view is not None
        mine = data[: self.spec.block_bytes - place.at]
        place.view[place.at : place.at + len(mine)] = mine
        place.digest.update(mine)
        place.at += len(mine)
        self.fresh += len(mine)
        self.stats.bytes_in += len(mine)
        return data[len(mine) :]

    async def _check(self, peer: Peer, place: _Place, epoch: int) -> None:
        """Lets a block land that is right; has the peer take it out of service when it is not."""
        place.let_go()
        if place.digest.digest() != place.offered.checksum:
            request = kvstore_pb2.QuarantineRequest(
                attachment_id=peer.attachment_id, key=place.offered.key, epoch=epoch
            )
            with suppress(Broken, TransportFault):
                await self.peers.call(peer, peer.stub.Quarantine, request, self.until)
            raise TransportFault("corrupt", "a block did not match its checksum")
        self.stats.blocks += 1
        self.landing.landed(place.offered)


@asynccontextmanager
async def open_grpc_transport(name: str, failed: Failed, **options: Any) -> AsyncIterator[GrpcTransport]:
    """A transport for the length of the block; `options` are those of GrpcTransport."""
    transport = GrpcTransport(name, failed, **options)
    try:
        yield transport
    finally:
        await transport.peers.close()
