"""The store as a member of the mesh: says hello to the router and keeps its index up to date, for ever."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import structlog

from penstock.errors import InvalidRequest
from penstock.kvstore.events.hub import EventHub, Subscriber
from penstock.kvstore.messages import events_message
from penstock.rpc.context import outgoing
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Member:
    """One membership per process start; a router that restarts is told everything again."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        host_id: str,
        hub: EventHub,
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
        self._pause = _FIRST_PAUSE_S

    async def run(self) -> None:
        """Joins, and joins again whenever the stream ends, with growing pauses, until cancelled."""
        while True:
            try:
                await self._join()
                self._log.info("the router ended the stream")
            except grpc.aio.AioRpcError as error:
                self._log.info("not joined", reason=error.details())
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(_LONGEST_PAUSE_S, self._pause * 2)

    async def _join(self) -> None:
        with self._hub.subscribe() as subscriber:
            call = self._stub.Join(self._requests(subscriber), metadata=outgoing())
            try:
                async for reply in call:
                    if reply.HasField("welcome"):
                        self._pause = _FIRST_PAUSE_S
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

    async def _requests(self, subscriber: Subscriber) -> AsyncIterator[router_pb2.JoinRequest]:
        yield router_pb2.JoinRequest(hello=self._hello)
        while (change := await subscriber.next()) is not None:
            yield router_pb2.JoinRequest(blocks=events_message(change))
