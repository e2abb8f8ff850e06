"""The store as a member of the mesh: says hello to every router, keeps their indices up to date, for ever, and tells
them what it has."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

import grpc
import structlog

from penstock.errors import InvalidRequest, PenstockError
from penstock.kv.events import EventHub, Subscriber
from penstock.kvstore.events.messages import events_message
from penstock.kvstore.table.blocks import TierKind
from penstock.rpc.checkup import WIRE, own_version
from penstock.rpc.context import outgoing
from penstock.rpc.stay import Connection, stay
from penstock.runtime.tasks import first_of
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

_LOAD_S = 1.0
"""Between two reports of what there is."""


@dataclass(slots=True)
class _Router:
    """One of the routers."""

    stub: router_pb2_grpc.RouterAsyncStub
    stores: Sequence[str] = ()
    """The stores that it last named; it may have gone since, they need not."""
    takes_loads: bool = False
    """Whether it wants to know what there is."""
    evicted: list[router_pb2.Evicted] = field(default_factory=list)
    """What it has not been told."""


class StoreMembership:
    """One membership per process start; a router that restarts is told everything again."""

    def __init__(
        self,
        routers: Sequence[grpc.aio.Channel],
        address: str,
        hub: EventHub[TierKind],
        *,
        host_id: str,
        others: Callable[[Sequence[str]], None],
        heard: Callable[[common_pb2.SessionHint], None],
        load: Callable[[], router_pb2.StoreLoad],
        evict: Callable[[router_pb2.EvictOrder], Awaitable[router_pb2.Evicted]],
    ) -> None:
        """`others` is told the addresses of all stores that have joined some router, whenever they change; `heard` is
        called with what a router says of sessions; `evict` drops a tenant's blocks."""
        self._routers = [_Router(router_pb2_grpc.RouterStub(channel)) for channel in routers]
        self._others = others
        self._hub = hub
        self._heard = heard
        self._load = load
        self._evict = evict
        self._hello = router_pb2.Hello(
            member_id=f"kvstore-{secrets.token_hex(8)}",
            role=router_pb2.ROLE_KVSTORE,
            address=address,
            host_id=host_id,
            version=own_version(),
            wire=WIRE,
        )
        self._log = structlog.get_logger("penstock.kvstore")

    async def run(self) -> None:
        """Joins, and joins again whenever a stream ends, until cancelled."""
        await first_of(*(stay(partial(self._join, one), peer="router", log=self._log) for one in self._routers))

    async def _join(self, router: _Router, connection: Connection) -> None:
        with self._hub.subscribe() as subscriber:
            router.evicted.clear()
            router.takes_loads = False
            call = router.stub.Join(self._requests(router, subscriber), metadata=outgoing())
            try:
                async for reply in call:
                    if reply.HasField("welcome"):
                        connection.established = True
                        router.takes_loads = reply.welcome.takes_store_loads
                        subscriber.stir()
                        self._log.info("joined", router=reply.welcome.router_id)
                    elif reply.HasField("stores"):
                        router.stores = tuple(reply.stores.addresses)
                        self._others(list(dict.fromkeys(address for one in self._routers for address in one.stores)))
                    elif reply.HasField("session_hint"):
                        self._hear(reply.session_hint)
                    elif reply.HasField("evict") and (answer := await self._dropped(reply.evict)) is not None:
                        router.evicted.append(answer)
                        subscriber.stir()
            finally:
                call.cancel()

    async def _dropped(self, order: router_pb2.EvictOrder) -> router_pb2.Evicted | None:
        """The answer to an eviction; None when some of it has failed: then nobody is to believe that all are gone."""
        try:
            return await self._evict(order)
        except PenstockError as error:
            self._log.warning("blocks of a tenant are not all dropped", reason=error.message)
            return None

    def _hear(self, hint: common_pb2.SessionHint) -> None:
        try:
            self._heard(hint)
        except InvalidRequest as error:
            self._log.warning("a session hint of the router is ignored", reason=error.message)

    async def _requests(
        self, router: _Router, subscriber: Subscriber[TierKind]
    ) -> AsyncIterator[router_pb2.JoinRequest]:
        """Blocks as they come and go, answers, and once in a while what there is, if that has changed."""
        yield router_pb2.JoinRequest(hello=self._hello)
        clock, said, said_at = asyncio.get_running_loop().time, router_pb2.StoreLoad(), -inf
        while not subscriber.closed:  # gRPC goes on reading when the router has gone, until this ends
            left_s = said_at + _LOAD_S - clock() if router.takes_loads else None
            if left_s is not None and left_s <= 0:
                said_at, left_s = clock(), _LOAD_S
                if (load := self._load()) != said:
                    said = load
                    yield router_pb2.JoinRequest(store=load)
            while router.evicted:
                yield router_pb2.JoinRequest(evicted=router.evicted.pop(0))
            if (change := subscriber.take()) is not None:
                yield router_pb2.JoinRequest(blocks=events_message(change))
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await subscriber.news()
