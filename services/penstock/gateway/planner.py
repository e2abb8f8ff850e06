"""The router's side of one request: its plans, and the charges that live as long as their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from penstock.errors import Unavailable
from penstock.gateway.faults import public_error
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

_PLAN_S = 5.0
"""A router that takes longer for one decision is as good as gone."""
_FAREWELL_S = 0.25

Remaining = Callable[[], float]
"""Seconds until the request's deadline."""


class Planner:
    """One Plan stream. When the router restarts, a later ask opens another."""

    def __init__(self, channels: Channels, router: str, remaining: Remaining) -> None:
        self._stub = router_pb2_grpc.RouterStub(channels.to(router))
        self._remaining = remaining
        self._call: grpc.aio.StreamStreamCall[router_pb2.PlanRequest, router_pb2.PlanResponse] | None = None

    async def ask(self, ask: router_pb2.PlanAsk) -> router_pb2.PlanResponse:
        """A plan, which replaces an earlier one. Raises Overloaded, Unavailable and what the router refuses."""
        request = router_pb2.PlanRequest(ask=ask)
        if self._call is not None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return await self._exchange(self._call, request)
            self._call.cancel()
        self._call = self._stub.Plan(timeout=self._remaining(), metadata=outgoing())
        try:
            return await self._exchange(self._call, request)
        except grpc.aio.AioRpcError as error:
            raise public_error(error, "no plan can be made for the request now") from error
        except asyncio.InvalidStateError:
            raise Unavailable("no plan can be made for the request now", retry_after=1) from None

    async def progress(self, prefill_done: bool, generated: int) -> None:
        """Tells the router what part of the charge is over. Never fails: the router is not on the token path."""
        if self._call is None or self._call.done():
            return
        progress = router_pb2.PlanProgress(prefill_done=prefill_done, generated=generated)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(router_pb2.PlanRequest(progress=progress))

    async def farewell(self, generated: int, hint: common_pb2.SessionHint) -> None:
        """Ends the stream in good order, so that the router learns how long the answer was, and what comes next."""
        await self.progress(True, generated)
        if self._call is None or self._call.done():
            return
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._call.write(router_pb2.PlanRequest(hint=hint))
                await self._call.done_writing()
                await self._call.read()

    def close(self) -> None:
        """Releases all charges."""
        if self._call is not None:
            self._call.cancel()

    @staticmethod
    async def _exchange(
        call: grpc.aio.StreamStreamCall[router_pb2.PlanRequest, router_pb2.PlanResponse],
        request: router_pb2.PlanRequest,
    ) -> router_pb2.PlanResponse:
        try:
            async with asyncio.timeout(_PLAN_S):
                await call.write(request)
                answer = await call.read()
        except TimeoutError:
            raise asyncio.InvalidStateError("the router does not answer") from None
        if not isinstance(answer, router_pb2.PlanResponse):
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                )
            raise asyncio.InvalidStateError("the router ended the stream without a plan")
        return answer
