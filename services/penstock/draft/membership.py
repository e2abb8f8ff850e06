"""The draft service as a member of the mesh: it tells every router what it has, and drops what an operator wants
dropped. Decode workers find it by their own settings; no router gives it work."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import structlog

from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Drafts
from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_namespace
from penstock.kv.host import host_id
from penstock.rpc.channels import open_channels
from penstock.rpc.checkup import WIRE, own_version
from penstock.rpc.context import outgoing
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.stay import Connection, stay
from penstock.runtime.tasks import beside, first_of
from penstock.v1 import router_pb2, router_pb2_grpc

_LOAD_S = 1.0
"""Between two reports of what there is."""
_Answers = asyncio.Queue[router_pb2.Evicted | None]
"""To orders; None: the stream has ended."""
_LOG = structlog.get_logger("penstock.draft")


class DraftMembership:
    """One membership per process start; a router that restarts is told everything again."""

    def __init__(
        self,
        routers: Sequence[grpc.aio.Channel],
        hello: router_pb2.Hello,
        *,
        load: Callable[[], router_pb2.DraftLoad],
        evict: Callable[[router_pb2.EvictOrder], Awaitable[router_pb2.Evicted]],
    ) -> None:
        """`load` says what there is, and `evict` drops what a tenant has."""
        self._stubs = [router_pb2_grpc.RouterStub(channel) for channel in routers]
        self._hello = hello
        self._load = load
        self._evict = evict

    async def run(self) -> None:
        """Joins, and joins again whenever a stream ends, until cancelled."""
        await first_of(*(stay(partial(self._join, stub), peer="router", log=_LOG) for stub in self._stubs))

    async def _join(self, stub: router_pb2_grpc.RouterAsyncStub, connection: Connection) -> None:
        answers: _Answers = asyncio.Queue()
        call = stub.Join(self._requests(answers), metadata=outgoing())
        try:
            async for reply in call:
                if reply.HasField("welcome"):
                    connection.established = True
                    _LOG.info("joined", router=reply.welcome.router_id)
                elif reply.HasField("evict"):
                    answers.put_nowait(await self._answer(reply.evict))
        finally:
            answers.put_nowait(None)
            call.cancel()

    async def _answer(self, order: router_pb2.EvictOrder) -> router_pb2.Evicted:
        try:
            return await self._evict(order)
        except InvalidRequest as error:
            _LOG.warning("an order to evict is ignored", reason=error.message)
            return router_pb2.Evicted(number=order.number)

    async def _requests(self, answers: _Answers) -> AsyncIterator[router_pb2.JoinRequest]:
        """Answers, and once in a while what there is, if that has changed; until the stream has ended."""
        yield router_pb2.JoinRequest(hello=self._hello)
        said: router_pb2.DraftLoad | None = None
        while True:
            if (load := self._load()) != said:
                said = load
                yield router_pb2.JoinRequest(draft=load)
            try:
                async with asyncio.timeout(_LOAD_S):
                    evicted = await answers.get()
            except TimeoutError:
                continue
            if evicted is None:  # gRPC goes on reading when the router has gone
                return
            yield router_pb2.JoinRequest(evicted=evicted)


@asynccontextmanager
async def draft_membership(
    config: DraftConfig, drafts: Drafts, address: str, member: MemberIdentity | None = None
) -> AsyncIterator[None]:
    """The service is a member of the mesh for the length of the block, if there are routers to join; they are told its
    `address` unless the settings have another."""
    if not config.router:
        yield
        return

    async def evict(order: router_pb2.EvictOrder) -> router_pb2.Evicted:
        check_namespace("evict.namespace", order.namespace)
        dropped = await drafts.drop(order.namespace) if order.namespace else None
        if dropped is None:
            return router_pb2.Evicted(number=order.number)
        _LOG.info("blocks of a tenant are dropped", blocks=dropped.blocks, in_use=dropped.in_use)
        told = router_pb2.EvictedBlocks(blocks=dropped.blocks, bytes=dropped.bytes, in_use=dropped.in_use)
        return router_pb2.Evicted(number=order.number, tiers=[told])

    hello = router_pb2.Hello(
        member_id=f"draft-{secrets.token_hex(8)}",
        role=router_pb2.ROLE_DRAFT,
        address=str(config.advertise or address),
        host_id=config.host_id or host_id(),
        model_name=Path(config.model if config.head in ("", "none") else config.head).name,
        version=own_version(),
        wire=WIRE,
    )
    async with open_channels(member) as channels:
        routers = [channels.to(router, "router") for router in config.router]
        membership = DraftMembership(routers, hello, load=drafts.load, evict=evict)
        failed = drafts.metrics.task_failed
        async with beside(membership.run, name="membership", on_failure="restart", failed=failed):
            yield
