"""Attachments at other stores, opened when they are needed and closed when they are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from penstock.kv.bytes import bulk
from penstock.kv.spec import KvSpec, spec_to_message
from penstock.kvstore.elsewhere.transport.base import Reason, TransportFault
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.tasks import Failed, start
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Broken(Exception):
    """The connection failed or stalled; a fresh one may do better."""

    def __init__(self, text: str, reason: Reason = "broken") -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Peer:
    """An open attachment at another store."""

    address: str
    attachment_id: str
    stub: Any
    read: Any
    """Its `Read`; see bulk."""
    attached: Any
    """The call that keeps the attachment open."""
    channels: Channels
    """A connection of its own: closing it disturbs no other attachment."""
    users: int = 0
    idle: asyncio.TimerHandle | None = None


class Peers:
    """At most one attachment per address."""

    def __init__(
        self, name: str, stall_s: float, idle_s: float, failed: Failed, member: MemberIdentity | None = None
    ) -> None:
        """`name` is for the peers' logs; `stall_s` is the longest wait for a sign of life; `member` is
        who this store is to them.

        An attachment ends `idle_s` after its last use: it would keep the peer from changing its spec.
        """
        self._name = name
        self._member = member
        self._stall_s = stall_s
        self._idle_s = idle_s
        self._failed = failed
        self._open: dict[str, Peer] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._strays: set[Any] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def attachment(self, address: str, spec: KvSpec, until: float) -> AsyncIterator[Peer]:
        """An open attachment for blocks of `spec`. Raises TransportFault or Broken."""
        async with self._attaching.setdefault(address, asyncio.Lock()):
            peer = self._open.get(address)
            if peer is None or peer.attached.done():
                peer = self._open[address] = await self._attach(address, spec, until)
        peer.users += 1
        if peer.idle is not None:
            peer.idle.cancel()
        try:
            yield peer
        finally:
            peer.users -= 1
            if self._open.get(address) is not peer:
                self._end(peer)
            elif peer.users == 0:
                peer.idle = asyncio.get_running_loop().call_later(self._idle_s, self._end, peer)

    async def _attach(self, address: str, spec: KvSpec, until: float) -> Peer:
        channels = Channels(self._member)
        channel = channels.to(address, "store")
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        call = stub.Attach(kvstore_pb2.AttachRequest(client=self._name, spec=spec_to_message(spec), peer=True))
        try:
            async with asyncio.timeout(self.patience(until)):
                first = await call.read()
            if not isinstance(first, kvstore_pb2.AttachResponse):
                raise Broken("it ended the attachment")
            return Peer(address, first.attachment_id, stub, bulk.read_method(channel), call, channels)
        except BaseException as error:
            call.cancel()
            self._close(channels)
            if isinstance(error, (TimeoutError, grpc.aio.AioRpcError)):
                self.failed(None, error)
            raise

    async def call(self, peer: Peer, method: Any, request: Any, until: float) -> Any:
        """One unary call. Raises TransportFault or Broken."""
        try:
            return await method(request, timeout=self.patience(until), metadata=outgoing())
        except grpc.aio.AioRpcError as error:
            self.failed(peer, error)

    def tell(self, peer: Peer, method: Any, request: Any) -> None:
        """Makes a call without waiting for its answer."""
        if self._open.get(peer.address) is peer:
            call = method(request, timeout=self._stall_s)
            self._strays.add(call)  # it would be cancelled when it is garbage
            call.add_done_callback(self._strays.discard)

    def patience(self, until: float) -> float:
        """Seconds to wait for the next sign of life. Raises TransportFault when the time is over."""
        left = until - time.monotonic()
        if left <= 0:
            raise TransportFault("late", "the time is over")
        return min(left, self._stall_s)

    def failed(self, peer: Peer | None, error: TimeoutError | grpc.aio.AioRpcError) -> NoReturn:
        """Translates a failed call: TransportFault if the peer refuses; else Broken, and the attachment is dropped."""
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS:
            raise TransportFault("refused", error.details() or error.code().name) from error
        if peer is not None and self._open.get(peer.address) is peer:
            del self._open[peer.address]
        if isinstance(error, TimeoutError) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Broken("no answer", "stalled") from error
        raise Broken(error.details() or error.code().name) from error

    def _end(self, peer: Peer) -> None:
        """Takes an attachment out of use, and closes it with its last user."""
        if self._open.get(peer.address) is peer:
            del self._open[peer.address]
        if peer.idle is not None:
            peer.idle.cancel()
        if peer.users == 0:
            peer.attached.cancel()
            self._close(peer.channels)

    def _close(self, channels: Channels) -> None:
        task = start(channels.close, name="closing a connection", on_failure="log", failed=self._failed)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Ends the attachments. When no fetch is under way."""
        for peer in list(self._open.values()):
            self._end(peer)
        if self._closing:
            await asyncio.wait(self._closing)
