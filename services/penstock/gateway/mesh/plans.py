"""The router's side of one request: its plans, and the charges that live as long as their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from penstock.errors import NotFound, Unavailable
from penstock.gateway.mesh import wire
from penstock.gateway.mesh.faults import public_error
from penstock.gateway.request.work import Assignment, ChoiceRequest
from penstock.kv.hint import ReturnHint
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.v1 import router_pb2, router_pb2_grpc

_PLAN_S = 5.0
"""Seconds for one decision of the router, which otherwise counts as unavailable."""
_FAREWELL_S = 0.25
_HINT_S = 2.0
_NO_PLAN = "no plan can be made for the request now"

_Call = grpc.aio.StreamStreamCall[router_pb2.PlanRequest, router_pb2.PlanResponse]


class RouterCalls:
    """The router, for all requests."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._stub = router_pb2_grpc.RouterStub(channels.to(address))

    def plans(self, remaining: Callable[[], float]) -> PlanStream:
        """The plans of one choice; `remaining` gives the seconds until the request's deadline."""
        return PlanStream(self._stub, remaining)

    async def hint(self, session: str, hint: ReturnHint) -> None:
        """Tells the router, which tells every store. Raises Unavailable when it can't be reached."""
        try:
            await self._stub.Hint(wire.session_hint(session, hint), timeout=_HINT_S, metadata=outgoing())
        except grpc.aio.AioRpcError as error:
            raise public_error(error, "session hints cannot be passed on at the moment; try again") from error


class PlanStream:
    """One Plan stream, made by `RouterCalls.plans`. When the router restarts, a later ask opens another."""

    def __init__(self, router: router_pb2_grpc.RouterAsyncStub, remaining: Callable[[], float]) -> None:
        self._stub = router
        self._remaining = remaining
        self._call: _Call | None = None

    async def ask(self, request: ChoiceRequest, generated: int, avoid: Sequence[str]) -> Assignment:
        """Asks the router for workers, which replace those of an earlier plan. Raises Overloaded, Unavailable, and the
        error with which the router refuses the request.

        `generated` tokens of the answer exist; the members in `avoid` have failed.
        """

        async def answer(call: _Call) -> Assignment:
            said = await self._exchange(call, wire.plan_ask(request, generated, avoid, request.known_keys))
            if said.keys_wanted:
                said = await self._exchange(call, wire.plan_ask(request, generated, avoid))
            return wire.assignment(said)

        if self._call is not None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return await answer(self._call)
            self._call.cancel()
        self._call = self._stub.Plan(timeout=self._remaining(), metadata=outgoing())
        try:
            return await answer(self._call)
        except grpc.aio.AioRpcError as error:
            fault = public_error(error, _NO_PLAN)
            if isinstance(fault, NotFound):  # the model exists, so its workers have left
                fault = Unavailable(_NO_PLAN, code="unavailable", retry_after=1)
            raise fault from error
        except asyncio.InvalidStateError:
            raise Unavailable(_NO_PLAN, code="unavailable", retry_after=1) from None

    async def progress(self, generated: int) -> None:
        """Tells the router that the prompt is computed. Never fails: the router is not on the token path."""
        if self._call is None or self._call.done():
            return
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(wire.plan_progress(generated))

    async def farewell(self, generated: int, hint: ReturnHint, *, waits_for_tool: bool) -> None:
        """Ends the stream properly: the router learns the length of the answer and the session's next move."""
        await self.progress(generated)
        if self._call is None or self._call.done():
            return
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._call.write(wire.plan_hint(hint, waits_for_tool=waits_for_tool))
                await self._call.done_writing()
                await self._call.read()

    def close(self) -> None:
        """Releases all charges."""
        if self._call is not None:
            self._call.cancel()

    @staticmethod
    async def _exchange(call: _Call, request: router_pb2.PlanRequest) -> router_pb2.PlanResponse:
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
