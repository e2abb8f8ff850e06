"""Calls to workers: manages channel, stub, deadline and end of each call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import grpc

from penstock.gateway.mesh import wire
from penstock.gateway.mesh.faults import blames_member, public_error
from penstock.gateway.mesh.view import RouterView
from penstock.gateway.request.work import (
    Assignment,
    ChoiceRequest,
    Gain,
    Lost,
    Placement,
    Report,
    Stage,
    workers_failed,
)
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.runtime.tasks import being_cancelled
from penstock.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

Message = TypeVar("Message")
_Call = grpc.aio.UnaryStreamCall[Any, Message]


class WorkerChannels:
    """Lends channels. One whose peer could not be reached is closed when its last user is done: workers come back
    under other addresses, and gRPC would try the old one for ever."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._uses: Counter[str] = Counter()
        self._unreachable: set[str] = set()

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address`, for one call."""
        self._uses[address] += 1
        try:
            yield self._channels.to(address)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._unreachable.add(address)
            raise
        finally:
            self._uses[address] -= 1
            if self._uses[address] == 0:
                del self._uses[address]
                await self._close_unreachable(address)

    async def _close_unreachable(self, address: str) -> None:
        if address in self._unreachable:
            self._unreachable.discard(address)
            await self._channels.forget(address)


class Workers:
    """The workers, for one request.

    Each generator is one call: it reports gains until the call ends well, or a last `Lost`. It raises PenstockError
    when the request itself is refused; closing it ends the call.
    """

    def __init__(self, channels: WorkerChannels, view: RouterView, remaining: Callable[[], float]) -> None:
        """`remaining` gives the seconds until the request's deadline."""
        self._channels = channels
        self._view = view
        self._remaining = remaining

    async def prefill(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int]
    ) -> AsyncGenerator[Report, None]:
        """The token after `output`, from the assignment's prefill worker: one report."""
        place = chosen.prefill
        assert place is not None

        def call(channel: grpc.aio.Channel) -> _Call[prefill_pb2.PrefillEvent]:
            message = wire.prefill_request(request, output, place, chosen.epoch)
            stub = prefill_pb2_grpc.PrefillStub(channel)
            return stub.Prefill(message, timeout=self._remaining(), metadata=outgoing())

        async with aclosing(self._reports("prefill", place, call, wire.prefill_gain)) as reports:
            async for report in reports:
                yield report
                return
        yield Lost("prefill", place.member, workers_failed())

    def decode(self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int]) -> AsyncGenerator[Report, None]:
        """The tokens after `output`, from the assignment's decode worker; those that prefill samples may be missing."""

        def call(channel: grpc.aio.Channel) -> _Call[decode_pb2.GenerateEvent]:
            message = wire.generate_request(request, output, chosen)
            stub = decode_pb2_grpc.DecodeStub(channel)
            return stub.Generate(message, timeout=self._remaining(), metadata=outgoing())

        return self._reports("decode", chosen.decode, call, wire.decode_gain)

    async def _reports(
        self,
        stage: Stage,
        place: Placement,
        call: Callable[[grpc.aio.Channel], _Call[Message]],
        read: Callable[[Message], Gain | None],
    ) -> AsyncGenerator[Report, None]:
        silent = False

        def end() -> None:
            nonlocal silent
            silent = True
            running.cancel()

        try:
            async with self._channels.at(place.address) as channel:
                running = call(channel)
                try:
                    with self._view.heard(place.member, end):
                        async for message in running:
                            if (gain := read(message)) is not None:
                                yield gain
                finally:
                    running.cancel()
        except grpc.aio.AioRpcError as error:
            fault = public_error(error, workers_failed().message)
            if not blames_member(error):
                raise fault from error
        except asyncio.CancelledError:  # also how a call tells that it was torn down under its reader
            if being_cancelled():
                raise
            fault = workers_failed()
        else:
            return
        yield Lost(stage, place.member, fault, silent)
