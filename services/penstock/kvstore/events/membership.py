"""The store as a member of the mesh: says hello to the router and keeps its index up to date, for ever."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import structlog

from penstock.errors import InvalidRequest
from penstock.kv.events import EventHub, Subscriber
from penstock.kvstore.events.messages import events_message
from penstock.kvstore.table.blocks import TierKind
from penstock.rpc.context import outgoing
from penstock.rpc.stay import Connection, stay
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc


class StoreMembership:
    """One membership per process start; a router that restarts is told everything again."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        hub: EventHub[TierKind],
        *,
        host_id: str,
        others: Callable[[Sequence[str]], None],
        heard: Callable[[common_pb2.SessionHint], None],
    ) -> None:
        """`others` is told the addresses of all joined stores, whenever they change; `heard` is called with what the
        router says of sessions."""
        self._stub = router_pb2_grpc.RouterStub(channel)
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
        """Joins, and joins again whenever the stream ends, until cancelled."""
        await stay(self._join, peer="router", log=self._log)

    async def _join(self, connection: Connection) -> None:
        with self._hub.subscribe() as subscriber:
            call = self._stub.Join(self._requests(subscriber), metadata=outgoing())
            try:
                async for reply in call:
                    if reply.HasField("welcome"):
                        connection.established = True
                        self._log.info("joined", router=reply.welcome.router_id)
                    elif reply.HasField("stores"):
                        self._others(reply.stores.addresses)
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
