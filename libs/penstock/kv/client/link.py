"""The connection of a client to its store: attached while the store is there, looked for when it is not.

A store that does not answer costs one caller the time limit and the following ones microseconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import grpc
import structlog

from penstock.errors import Unavailable
from penstock.kv.bytes import bulk
from penstock.kv.bytes.arena import ArenaMap, Layout, MapError
from penstock.kv.device.mapped import DeviceMap
from penstock.kv.device.memory import Device, DeviceFault
from penstock.kv.parts import MARK_BYTES, BlockParts
from penstock.kv.sealing import SEAL_KEY_BYTES, Seal, far_pieces, is_sealed, trailer_bytes
from penstock.kv.spec import KvSpec, spec_to_message
from penstock.rpc.context import outgoing
from penstock.rpc.stay import Connection, Pauses, stay
from penstock.runtime.tasks import being_cancelled
from penstock.runtime.threads import to_its_end
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

_INLINE_BYTES = 1 << 20
"""Copying and checking less than this is done on the event loop; it takes well under a millisecond."""
_PAUSES = Pauses(refused=2.0)
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.CANCELLED,
)

Result = TypeVar("Result")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
_RequestT_contra = TypeVar("_RequestT_contra", contravariant=True)
_ResponseT_co = TypeVar("_ResponseT_co", covariant=True)


class Method(Protocol[_RequestT_contra, _ResponseT_co]):
    """A method of the store with one answer."""

    def __call__(
        self,
        request: _RequestT_contra,
        /,
        *,
        timeout: float | None = None,
        metadata: grpc.aio.Metadata | Sequence[tuple[str, str | bytes]] | None = None,
    ) -> Awaitable[_ResponseT_co]: ...


AttachCall = grpc.aio.UnaryStreamCall[kvstore_pb2.AttachRequest, kvstore_pb2.AttachResponse]
ReadCall = grpc.aio.UnaryStreamCall[kvstore_pb2.ReadRequest, bytes]


class StoreFault(Unavailable):
    """The store can't help now: compute instead."""


@dataclass(slots=True)
class ClientStats:
    """Counters since the start; blocks unless named otherwise."""

    fetched: int = 0
    far: int = 0
    """Those of them of which only the far part was read."""
    put: int = 0
    bytes_in: int = 0
    """Read from the store."""
    bytes_out: int = 0
    """Written to the store."""
    mismatches: int = 0
    """Blocks whose bytes did not match their checksum."""
    late_commits: int = 0
    """Written, but the reservation was over."""
    lapsed: int = 0
    """Leases that ended before their reader did."""
    faults: int = 0
    """Calls that ended in a StoreFault, fast ones while disconnected included."""
    attached: int = 0
    """Attachments opened."""
    mapped: int = 0
    """Attachments with the store's memory mapped."""
    on_device: int = 0
    """Blocks read on the device."""


@dataclass(slots=True, eq=False)
class AttachStream:
    """One Attach stream."""

    attachment_id: str
    memory: ArenaMap | None
    call: AttachCall
    over: bool = False
    users: int = 0
    on_device: DeviceMap | None = None
    """The store's memory on the client's device."""
    ranges: bool = False
    """Whether the store sends parts of blocks; older ones don't."""

    def end(self) -> None:
        """Cancels the stream. The memory is unmapped after its last use."""
        if not self.over:
            self.over = True
            self.call.cancel()
            self._unmap()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keeps the memory mapped for the length of the block."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self._unmap()

    def _unmap(self) -> None:
        if not self.over or self.users:
            return
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self.on_device is not None:
            self.on_device.close()
            self.on_device = None


class Link:
    """Owns the attachment, and makes every call. Run `stay_attached` while it is in use; `close` at the end."""

    def __init__(
        self,
        channel: grpc.aio.Channel | None,
        client: str,
        spec: KvSpec,
        *,
        host_id: str,
        timeout_s: float,
        threads: ThreadPoolExecutor,
        device: Device | None = None,
        draft: bool = False,
        parts: BlockParts | None = None,
    ) -> None:
        """`parts` are those of blocks with a mark, or of sealed ones with two seals; see penstock.kv.parts."""
        self.stats = ClientStats()
        self.reason = "no store is configured" if channel is None else "not attached yet"
        """Why the store is not connected, for people."""
        self.spec = spec
        self.seals = is_sealed(spec)
        self.parts = parts
        self.far_pieces = [] if parts is None else far_pieces(parts) if self.seals else parts.wanted
        """(Begin, end) of what is read of a block whose far part is enough."""
        behind = trailer_bytes(parts) if self.seals else MARK_BYTES if parts is not None else 0
        self.content_bytes = spec.block_bytes - behind
        """Of a block as callers have it."""
        self.attachment: AttachStream | None = None
        self.on_attach: list[Callable[[], None]] = []
        """Called for each new attachment."""
        self.log = structlog.get_logger("penstock.kv").bind(client=client)
        self._channel = channel
        self._stub = kvstore_pb2_grpc.KvStoreStub(channel) if channel is not None else None
        self._read = bulk.read_method(channel) if channel is not None else None
        self._client = client
        self._host_id = host_id
        self._device = device
        self._draft = draft
        self._timeout_s = timeout_s
        self._threads = threads
        self._attempted = asyncio.Event()

    # -- calls

    @property
    def rpc(self) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        """The store's methods. Use them only while there is an attachment."""
        assert self._stub is not None
        return self._stub

    def need(self) -> AttachStream:
        """The attachment. Raises StoreFault when there is none."""
        if self.attachment is None:
            raise self.fault(f"the store is not connected: {self.reason}")
        return self.attachment

    async def call(
        self, attachment: AttachStream, method: Method[RequestT, ResponseT], request: RequestT, *, more_s: float = 0.0
    ) -> ResponseT:
        """One answer, `more_s` seconds after the time limit at the latest. Raises StoreFault."""
        try:
            return await method(request, timeout=self._timeout_s + more_s, metadata=outgoing())
        except grpc.aio.AioRpcError as error:
            raise self.failed(attachment, error) from error

    def read(
        self, request: kvstore_pb2.ReadRequest, until: float
    ) -> grpc.aio.UnaryStreamCall[kvstore_pb2.ReadRequest, bytes]:
        """A `Read` that ends well before `until`; to be cancelled by the caller."""
        assert self._read is not None
        return self._read(request, timeout=max(0.001, (until - time.monotonic()) * 0.9), metadata=outgoing())

    @asynccontextmanager
    async def limit(self, attachment: AttachStream) -> AsyncIterator[float]:
        """Ends the block after the time limit; the value is the time of that."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield time.monotonic() + self._timeout_s
        except TimeoutError as error:
            self.lost(attachment, "the store does not answer")
            raise self.fault("the store did not answer in time") from error

    async def work(self, size: int, job: Callable[[threading.Event], Result]) -> Result:
        """Runs a job over `size` bytes, in a thread when it would hold up the event loop.

        When cancelled it returns only after the thread has stopped touching memory, which takes one block.
        """
        stop = threading.Event()
        if size <= _INLINE_BYTES:
            return job(stop)
        return await to_its_end(self._threads, partial(job, stop), stop=stop.set)

    def seal(self, key: bytes) -> Seal | None:
        """For the blocks of the tenant with this key; None where blocks are not sealed. Raises StoreFault where they
        are, and there is no key."""
        if not self.seals:
            return None
        if len(key) != SEAL_KEY_BYTES:
            raise self.fault("blocks are sealed here, and the request came without a key for them")
        return Seal(key, self.parts)

    # -- faults

    def fault(self, message: str) -> StoreFault:
        """A counted fault, to be raised."""
        self.stats.faults += 1
        return StoreFault(message)

    def failed(self, attachment: AttachStream, error: grpc.aio.AioRpcError, *, of_lease: bool = False) -> StoreFault:
        """Also ends the attachment when the store seems to be gone, so that the next caller does not wait as long.

        A call `of_lease` that finds nothing says that the lease is over; nothing more.
        """
        over = of_lease and error.code() is grpc.StatusCode.NOT_FOUND
        if error.code() in _GONE and not over:
            self.lost(attachment, error.details() or error.code().name)
        return self.fault(f"the store failed: {error.details()}")

    def lost(self, attachment: AttachStream, reason: str) -> None:
        """Ends the attachment."""
        if self.attachment is attachment:
            self.attachment = None
            self.reason = reason
            self.log.info("store lost", reason=reason)
        attachment.end()

    # -- attaching

    async def first_attempt(self) -> None:
        """Returns when the first attempt to attach has succeeded or failed, at the latest after the time limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._attempted.wait()

    async def stay_attached(self) -> None:
        """Attaches, and attaches again whenever the attachment ends, until cancelled."""
        if self._stub is None:
            self._attempted.set()
            return
        await stay(self._connect, peer="store", log=self.log, pauses=_PAUSES)

    async def _connect(self, connection: Connection) -> None:
        """One attachment, from its beginning to its end; says in `reason` why it ended."""
        self.reason = "the store ended the attachment"
        try:
            await self._attach(connection)
        except TimeoutError:
            self.reason = "the store does not answer"
            raise
        except grpc.aio.AioRpcError as error:
            self.reason = error.details() or error.code().name
            raise
        finally:
            self._attempted.set()

    async def _attach(self, connection: Connection) -> None:
        device = self._device.info.uuid if self._device is not None else ""
        request = kvstore_pb2.AttachRequest(
            client=self._client, spec=spec_to_message(self.spec), draft=self._draft, device=device
        )
        call = self.rpc.Attach(request)
        attachment: AttachStream | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                first = await call.read()
            if not isinstance(first, kvstore_pb2.AttachResponse):
                return
            attachment = self.attachment = self._begin(first, call)
            connection.established = True
            self.reason = ""
            self._attempted.set()
            for told in self.on_attach:
                told()
            await call.read()
            self.reason = "the store ended the attachment"
        except asyncio.CancelledError:
            if being_cancelled() or attachment is None or not attachment.over:
                raise
            # the call was cancelled, not this task: see `lost`
        finally:
            call.cancel()
            if attachment is not None:
                self.lost(attachment, "the store ended the attachment")

    def _begin(self, first: kvstore_pb2.AttachResponse, call: AttachCall) -> AttachStream:
        memory = self._map(first)
        self.stats.attached += 1
        self.stats.mapped += memory is not None
        self.log.info("attached to the store", mapped=memory is not None)
        on_device = self._map_device(first)
        return AttachStream(first.attachment_id, memory, call, on_device=on_device, ranges=first.ranges)

    def _map(self, first: kvstore_pb2.AttachResponse) -> ArenaMap | None:
        if first.host_id != self._host_id or not first.arena_path:
            return None
        layout = Layout(first.slots, first.slots_at, first.slot_stride, first.epochs_at)
        try:
            return ArenaMap(first.arena_path, first.arena_bytes, first.arena_id, layout)
        except MapError as error:
            self.log.warning("streaming from the store of this host", reason=str(error))
            return None

    def _map_device(self, first: kvstore_pb2.AttachResponse) -> DeviceMap | None:
        if self._device is None or first.host_id != self._host_id or not first.HasField("device"):
            return None
        try:
            return DeviceMap(self._device, first.device, self.content_bytes)
        except (DeviceFault, MapError, ValueError) as error:
            self.log.warning("not reading on the device of the store", reason=str(error))
            return None

    def close(self) -> None:
        """Ends the attachment; the store takes back its leases and reservations."""
        if self.attachment is not None:
            self.lost(self.attachment, "closed")
