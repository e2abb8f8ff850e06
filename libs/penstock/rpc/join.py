"""A worker's side of `Router.Join`: it stays joined when the router restarts or the network breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc
import structlog

from penstock.rpc.capability import RENEW_S, PlanKeys
from penstock.rpc.stay import Connection, Pauses, stay
from penstock.rpc.wish import WorkerWish, WorkWanted
from penstock.runtime.tasks import first_of
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[router_pb2.JoinRequest, router_pb2.JoinResponse]

_LEAST_PAUSE_S = 0.05
_MOST_PAUSE_S = 0.5
"""A router that hears nothing for four times as long takes a member for dead."""
_WELCOME_S = 5.0
_PAUSES = Pauses(longest=0.5)
"""Requests wait while their router has come back and its workers have not."""


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


def _nothing_to_evict(order: router_pb2.EvictOrder) -> router_pb2.Evicted:
    return router_pb2.Evicted(number=order.number)


async def _no_adapters(order: router_pb2.AdapterOrder) -> router_pb2.AdapterDone:
    return router_pb2.AdapterDone(number=order.number, error="this member takes no adapters")


def _no_blocks() -> AbstractContextManager[BlockNews]:
    return nullcontext(_NoBlocks())


async def stay_joined(
    channel: grpc.aio.Channel,
    hello: router_pb2.Hello,
    load: Callable[[], router_pb2.Load],
    *,
    blocks: Callable[[], AbstractContextManager[BlockNews]] = _no_blocks,
    changed: asyncio.Event | None = None,
    wish: WorkerWish | None = None,
    joined: asyncio.Event | None = None,
    obey: Callable[[router_pb2.MemberCommand], None] = lambda command: None,
    evict: Callable[[router_pb2.EvictOrder], router_pb2.Evicted] = _nothing_to_evict,
    plan_keys: PlanKeys | None = None,
    adapters: Callable[[], Sequence[router_pb2.Adapter]] = tuple,
    adapt: Callable[[router_pb2.AdapterOrder], Awaitable[router_pb2.AdapterDone]] = _no_adapters,
) -> NoReturn:
    """Cancel it to leave. A lost stream is opened again as `stay` has it, also after a refusal: the members that this
    worker does not fit may have left by then.

    `load` is sent at once, then when `changed` is set (this clears it; at most every 50 ms), at least twice a second.
    What is new of `blocks`, which is opened for each stream, is sent before it. What is new of `wish` is told at
    once; its role takes the place of that of `hello`. `joined` is set while the router has this member. `obey` gets the
    router's commands; `evict` drops a tenant's blocks, and says how many they were. The router gets one of `plan_keys`
    with each stream, and now and then another. `adapters` are those that the worker has, and `adapt` loads or unloads
    one, one after the other.
    """
    membership = _Membership(
        hello,
        load,
        blocks=blocks,
        changed=changed or asyncio.Event(),
        wish=wish or WorkerWish(hello.role),
        joined=joined or asyncio.Event(),
        obey=obey,
        evict=evict,
        plan_keys=plan_keys or PlanKeys(),
        adapters=adapters,
        adapt=adapt,
    )
    log = structlog.get_logger("penstock.join").bind(member=hello.member_id)

    async def connect(connection: Connection) -> None:
        await membership.hold(router_pb2_grpc.RouterStub(channel).Join(), connection)

    await stay(connect, peer="router", log=log, pauses=_PAUSES)


class _Membership:
    """The reports of one worker to its router, over one stream after another."""

    def __init__(
        self,
        hello: router_pb2.Hello,
        load: Callable[[], router_pb2.Load],
        *,
        blocks: Callable[[], AbstractContextManager[BlockNews]],
        changed: asyncio.Event,
        wish: WorkerWish,
        joined: asyncio.Event,
        obey: Callable[[router_pb2.MemberCommand], None],
        evict: Callable[[router_pb2.EvictOrder], router_pb2.Evicted],
        plan_keys: PlanKeys,
        adapters: Callable[[], Sequence[router_pb2.Adapter]],
        adapt: Callable[[router_pb2.AdapterOrder], Awaitable[router_pb2.AdapterDone]],
    ) -> None:
        self._hello = router_pb2.Hello()
        self._hello.CopyFrom(hello)
        self._load = load
        self._blocks = blocks
        self._changed = changed
        self._wish = wish
        self._joined = joined
        self._obey = obey
        self._evict = evict
        self._plan_keys = plan_keys
        self._adapters = adapters
        self._adapt = adapt
        self._orders: asyncio.Queue[router_pb2.AdapterOrder] = asyncio.Queue()
        """What the router of this stream wants of the adapters."""
        self._adapted: list[router_pb2.AdapterDone] = []
        """What came of it, of which that router has not been told."""
        self._known_adapters: list[router_pb2.Adapter] | None = None
        """Those that it knows of; None: it does not want to know."""
        self._evicted: list[router_pb2.Evicted] = []
        """What the router of this stream has not been told."""
        self._told = WorkWanted(hello.role)
        """What the router of this stream knows."""

    async def hold(self, call: Call, connection: Connection) -> None:
        """Returns when the router ended the stream; raises TimeoutError when it sends no welcome, and AioRpcError when
        it or the way there failed."""
        self._told = WorkWanted(self._wish.now.role)
        self._evicted.clear()
        self._adapted.clear()
        self._orders = asyncio.Queue()
        self._hello.role = self._told.role
        del self._hello.adapters[:]
        self._hello.adapters.extend(self._adapters())
        with self._plan_keys.of_stream() as new_key:
            self._hello.plan_key = new_key()
            try:
                async with asyncio.timeout(_WELCOME_S):
                    await call.write(router_pb2.JoinRequest(hello=self._hello))
                    answer = await call.read()
                if answer is not grpc.aio.EOF:
                    connection.established = True
                    takes = isinstance(answer, router_pb2.JoinResponse) and answer.welcome.takes_adapters
                    self._known_adapters = list(self._hello.adapters) if takes else None
                    self._joined.set()
                    await self._report(call, new_key)
            finally:
                self._joined.clear()
                call.cancel()

    async def _report(self, call: Call, new_key: Callable[[], bytes]) -> None:
        """Returns when the router ended the stream. An error of the stream, or of `load`, leaves as it is."""
        with self._blocks() as news:
            await first_of(self._push(call, news, new_key), self._read_to_end(call), self._follow_orders())

    async def _follow_orders(self) -> NoReturn:
        """Loads and unloads adapters. Never returns."""
        while True:
            done = await self._adapt(await self._orders.get())
            self._adapted.append(done)
            self._changed.set()

    async def _push(self, call: Call, news: BlockNews, new_key: Callable[[], bytes]) -> None:
        """Sends load and blocks as often as it should; never returns: the stream's reader says when and why it
        ended."""
        clock = asyncio.get_running_loop().time
        renew_at = clock() + RENEW_S
        try:
            while True:
                if clock() >= renew_at:
                    renew_at = clock() + RENEW_S
                    await call.write(router_pb2.JoinRequest(plan_key=new_key()))
                await self._tell(call, self._wish.now)
                while (events := news.take()) is not None:
                    await call.write(router_pb2.JoinRequest(blocks=events))
                while self._evicted:
                    await call.write(router_pb2.JoinRequest(evicted=self._evicted.pop(0)))
                await self._tell_adapters(call)
                await call.write(router_pb2.JoinRequest(load=self._load()))
                await asyncio.sleep(_LEAST_PAUSE_S)
                await self._something_new(news)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.get_running_loop().create_future()

    async def _tell_adapters(self, call: Call) -> None:
        """Says which adapters there are now, and then what has come of orders."""
        done, self._adapted = self._adapted, []
        if self._known_adapters is not None and (now := list(self._adapters())) != self._known_adapters:
            self._known_adapters = now
            await call.write(router_pb2.JoinRequest(adapters=router_pb2.Adapters(adapters=now)))
        for one in done:
            if one.number:
                await call.write(router_pb2.JoinRequest(adapter_done=one))

    async def _tell(self, call: Call, wish: WorkWanted) -> None:
        """Says what has changed of what the worker wants. A role before the end of draining: the router never takes it
        for what it was."""
        told, self._told = self._told, wish
        if wish.role != told.role:
            await call.write(router_pb2.JoinRequest(role=wish.role))
        if wish.draining is not told.draining:
            await call.write(router_pb2.JoinRequest(draining=wish.draining))

    async def _something_new(self, news: BlockNews) -> None:
        """Returns when load, blocks or what the worker wants have changed, or the last push was long ago."""
        try:
            async with asyncio.timeout(_MOST_PAUSE_S - _LEAST_PAUSE_S):
                await first_of(news.wait(), self._changed.wait(), self._wish.other_than(self._told))
        except TimeoutError:
            pass
        self._changed.clear()

    async def _read_to_end(self, call: Call) -> None:
        """Does what the router says. Returns when it ended the stream; raises AioRpcError when the stream broke."""
        while isinstance(message := await call.read(), router_pb2.JoinResponse):
            if message.HasField("command"):
                self._obey(message.command)
            elif message.HasField("evict"):
                self._evicted.append(self._evict(message.evict))
                self._changed.set()
            elif message.HasField("adapter"):
                self._orders.put_nowait(message.adapter)
