"""A worker's side of `Router.Join`: it stays joined when the router restarts or the network breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc
import structlog

from penstock.rpc.stay import Connection, stay
from penstock.runtime.tasks import first_of
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[router_pb2.JoinRequest, router_pb2.JoinResponse]

_LEAST_PAUSE_S = 0.05
_MOST_PAUSE_S = 1.0
_WELCOME_S = 5.0


class BlockNews(Protocol):
    """The blocks of this worker, for one stream: all of them first, then every change."""

    async def wait(self) -> None:
        """Returns when there is something to tell."""

    def take(self) -> common_pb2.BlockEvents | None:
        """The next message; None when there is none now."""
        ...


class _NoBlocks:
    async def wait(self) -> None:
        await asyncio.get_running_loop().create_future()

    def take(self) -> None:
        return None


def _no_blocks() -> AbstractContextManager[BlockNews]:
    return nullcontext(_NoBlocks())


async def stay_joined(
    channel: grpc.aio.Channel,
    hello: router_pb2.Hello,
    load: Callable[[], router_pb2.Load],
    *,
    blocks: Callable[[], AbstractContextManager[BlockNews]] = _no_blocks,
    changed: asyncio.Event | None = None,
    draining: asyncio.Event | None = None,
    joined: asyncio.Event | None = None,
) -> NoReturn:
    """Cancel it to leave. A lost stream is opened again as `stay` has it, also after a refusal: the members that this
    worker does not fit may have left by then.

    `load` is sent at once, then when `changed` is set (this clears it; at most every 50 ms), at least once a second.
    What is new of `blocks`, which is opened for each stream, is sent before it. Once `draining` is set the router sends
    nothing new. `joined` is set while the router has this member.
    """
    membership = _Membership(
        hello,
        load,
        blocks=blocks,
        changed=changed or asyncio.Event(),
        draining=draining or asyncio.Event(),
        joined=joined or asyncio.Event(),
    )
    log = structlog.get_logger("penstock.join").bind(member=hello.member_id)

    async def connect(connection: Connection) -> None:
        await membership.hold(router_pb2_grpc.RouterStub(channel).Join(), connection)

    await stay(connect, peer="router", log=log)


class _Membership:
    """The reports of one worker to its router, over one stream after another."""

    def __init__(
        self,
        hello: router_pb2.Hello,
        load: Callable[[], router_pb2.Load],
        *,
        blocks: Callable[[], AbstractContextManager[BlockNews]],
        changed: asyncio.Event,
        draining: asyncio.Event,
        joined: asyncio.Event,
    ) -> None:
        self._hello = hello
        self._load = load
        self._blocks = blocks
        self._changed = changed
        self._draining = draining
        self._joined = joined

    async def hold(self, call: Call, connection: Connection) -> None:
        """Returns when the router ended the stream; raises TimeoutError when it sends no welcome, and AioRpcError when
        it or the way there failed."""
        try:
            async with asyncio.timeout(_WELCOME_S):
                await call.write(router_pb2.JoinRequest(hello=self._hello))
                answer = await call.read()
            if answer is not grpc.aio.EOF:
                connection.established = True
                self._joined.set()
                await self._report(call)
        finally:
            self._joined.clear()
            call.cancel()

    async def _report(self, call: Call) -> None:
        """Returns when the router ended the stream. An error of the stream, or of `load`, leaves as it is."""
        with self._blocks() as news:
            await first_of(self._push(call, news), _read_to_end(call))

    async def _push(self, call: Call, news: BlockNews) -> None:
        """Sends load and blocks as often as it should; never returns: the stream's reader says when and why it
        ended."""
        drain_told = False
        try:
            while True:
                if self._draining.is_set() and not drain_told:
                    drain_told = True
                    await call.write(router_pb2.JoinRequest(draining=True))
                while (events := news.take()) is not None:
                    await call.write(router_pb2.JoinRequest(blocks=events))
                await call.write(router_pb2.JoinRequest(load=self._load()))
                await asyncio.sleep(_LEAST_PAUSE_S)
                await self._something_new(news, drain_told)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.get_running_loop().create_future()

    async def _something_new(self, news: BlockNews, drain_told: bool) -> None:
        """Returns when the load or the blocks have changed, draining has begun, or the last push is a second old."""
        events = [self._changed] if drain_told else [self._changed, self._draining]
        try:
            async with asyncio.timeout(_MOST_PAUSE_S - _LEAST_PAUSE_S):
                await first_of(news.wait(), *(event.wait() for event in events))
        except TimeoutError:
            pass
        self._changed.clear()


async def _read_to_end(call: Call) -> None:
    """Returns when the router ended the stream; raises AioRpcError when the stream broke."""
    while await call.read() is not grpc.aio.EOF:
        pass
