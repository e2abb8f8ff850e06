"""A worker's side of `Router.Join`: it stays joined, whatever becomes of the router or the way there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from penstock.v1 import router_pb2, router_pb2_grpc

_LEAST_PAUSE_S = 0.05
_MOST_PAUSE_S = 1.0
_WELCOME_S = 5.0
_REFUSED_PAUSE_S = 5.0
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 2.0
_FINAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)

Call = Any
"""grpc.aio.StreamStreamCall[JoinRequest, JoinResponse]"""


async def stay_joined(
    channel: grpc.aio.Channel,
    hello: router_pb2.Hello,
    load: Callable[[], router_pb2.Load],
    *,
    changed: asyncio.Event | None = None,
    draining: asyncio.Event | None = None,
    joined: asyncio.Event | None = None,
) -> None:
    """Never returns; cancel it to leave. A lost stream is opened again after a growing pause, a refusal is logged as an
    error and tried again as well: those whom this worker does not fit may have left by then.

    `load` is sent at once, then when `changed` is set (this clears it; at most every 50 ms), at least once a second.
    Once `draining` is set the router sends nothing new. `joined` is set while the router has this member.
    """
    log = structlog.get_logger("penstock.join")
    backoff = _FIRST_BACKOFF_S
    while True:
        stay = _Stay(hello, load, changed or asyncio.Event(), draining or asyncio.Event(), joined or asyncio.Event())
        pause = backoff
        try:
            await stay.run(channel)
            log.info("the router ended the stream", member=hello.member_id)
        except TimeoutError:
            log.warning("no welcome from the router", member=hello.member_id)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                pause = _REFUSED_PAUSE_S
                log.error("the router refuses this member", member=hello.member_id, reason=error.details())
            elif stay.welcomed:
                log.warning("lost the router", member=hello.member_id, reason=error.details())
        backoff = _FIRST_BACKOFF_S if stay.welcomed else min(2 * backoff, _LAST_BACKOFF_S)
        await asyncio.sleep(pause)


class _Stay:
    """One stream."""

    def __init__(
        self,
        hello: router_pb2.Hello,
        load: Callable[[], router_pb2.Load],
        changed: asyncio.Event,
        draining: asyncio.Event,
        joined: asyncio.Event,
    ) -> None:
        self._hello = hello
        self._load = load
        self._changed = changed
        self._draining = draining
        self._joined = joined
        self.welcomed = False

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Returns when the router ended the stream, raises AioRpcError when it or the way there failed."""
        call: Call = router_pb2_grpc.RouterStub(channel).Join()
        try:
            async with asyncio.timeout(_WELCOME_S):
                await call.write(router_pb2.JoinRequest(hello=self._hello))
                answer = await call.read()
            if answer is not grpc.aio.EOF:
                self.welcomed = True
                self._joined.set()
                await self._stay(call)
        finally:
            self._joined.clear()
            call.cancel()

    async def _stay(self, call: Call) -> None:
        failure: grpc.aio.AioRpcError | None = None
        async with asyncio.TaskGroup() as tasks:
            pushing = tasks.create_task(self._push(call))
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                failure = error
            pushing.cancel()
        if failure is not None:
            raise failure

    async def _push(self, call: Call) -> None:
        """Load, as often as it should; ends with the stream, whose reader tells why."""
        drain_told = False
        try:
            while True:
                if self._draining.is_set() and not drain_told:
                    drain_told = True
                    await call.write(router_pb2.JoinRequest(draining=True))
                await call.write(router_pb2.JoinRequest(load=self._load()))
                await asyncio.sleep(_LEAST_PAUSE_S)
                await self._something_new(drain_told)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def _something_new(self, drain_told: bool) -> None:
        """Returns when the load has changed, draining has begun, or the last push is a second old."""
        events = [self._changed] if drain_told else [self._changed, self._draining]
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=_MOST_PAUSE_S - _LEAST_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._changed.clear()
