"""The store as a member of the mesh: says hello to every router and keeps their indices up to date, for ever."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from penstock.errors import InvalidRequest
from penstock.kv.events import EventHub, Subscriber
from penstock.kvstore.events.messages import events_message
from penstock.kvstore.table.blocks import TierKind
from penstock.rpc.context import outgoing
from penstock.rpc.stay import Connection, stay
from penstock.runtime.tasks import first_of
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc


@dataclass(slots=True)
class _Router:
    """One of the routers."""

    stub: router_pb2_grpc.RouterAsyncStub
    stores: Sequence[str] = ()
    """The stores that it last named; it may have gone since, they need not."""


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
    ) -> None:
        """`others` is told the addresses of all stores that have joined some router, whenever they change; `heard` is
        called with what a router says of sessions."""
        self._routers = [_Router(router_pb2_grpc.RouterStub(channel)) for channel in routers]
        self._others = others
        self._hub = hub
        self._heard = heard
        self._hello = router_pb2.Hello(
            member_id=f"kvstore-{secrets.token_hex(8)}",
            role=router_pb2.ROLE_KVSTORE,
            address=address,
            host_id=host_id,
        )
        self._log = structlog.get_logger("penstock.kvstore")

    async def run(self) -> None:
        """Joins, and joins again whenever a stream ends, until cancelled."""
        await first_of(*(stay(partial(self._join, one), peer="router", log=self._log) for one in self._routers))

    async def _join(self, router: _Router, connection: Connection) -> None:
        with self._hub.subscribe() as subscriber:
            call = router.stub.Join(self._requests(subscriber), metadata=outgoing())
            try:
                async for reply in call:
                    if reply.HasField("welcome"):
                        connection.established = True
                        self._log.info("joined", router=reply.welcome.router_id)
                    elif reply.HasField("stores"):
                        router.stores = tuple(reply.stores.addresses)
                        self._others(list(dict.fromkeys(address for one in self._routers for address in one.stores)))
                    elif reply.HasField("session_hint"):
                        self._hear(reply.session_hint)
            finally:
                call.cancel()

    def _hear(self, hint: common_pb2.SessionHint) -> None:
        try:
            self._heard(hint)
        except InvalidRequest as error:
            self._log.warning("a session hint of the router is ignored", reason=error.message)

    async def _requests(self, subscriber: Subscriber[TierKind]) -> AsyncIterator[router_pb2.JoinRequest]:
        yield router_pb2.JoinRequest(hello=self._hello)
        while (change := await subscriber.next()) is not None:
            yield router_pb2.JoinRequest(blocks=events_message(change))
