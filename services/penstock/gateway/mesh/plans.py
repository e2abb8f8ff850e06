"""The routers' side of one request: its plans, and the charges that live as long as their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

import grpc

from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.gateway.mesh import wire
from penstock.gateway.mesh.faults import public_error
from penstock.gateway.request.work import Assignment, ChoiceRequest, Reason
from penstock.kv.hint import ReturnHint
from penstock.rpc.channels import Channels
from penstock.rpc.context import outgoing
from penstock.rpc.errors import is_raised
from penstock.v1 import router_pb2, router_pb2_grpc

_PLAN_S = 5.0
"""Seconds for one decision of the router, which otherwise counts as unavailable."""
_OTHERS_S = 1.0
"""Likewise while there is another to ask."""
_FAREWELL_S = 0.25
_EVICT_S = 30.0
_HINT_S = 2.0
_NO_PLAN = "no plan can be made for the request now"
_NO_ANSWER = "no router answers at the moment; try again"

_ANOTHER_MAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""A router has gone, or has not heard of the workers yet. What it refuses is refused by the others too."""

Answer = TypeVar("Answer")
AskRouter = Callable[["router_pb2_grpc.RouterAsyncStub"], Awaitable[Answer]]
"""Asks one router."""
_Call = grpc.aio.StreamStreamCall[router_pb2.PlanRequest, router_pb2.PlanResponse]


class Routers(Protocol):
    """Which routers there are at each site; see RouterView."""

    def routers(self, site: str) -> list[str]: ...

    async def gave_up(self, site: str, router: str) -> None: ...


class HeldBack(Exception):
    """The router has no room for the request now, and gives its plan when there is some."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s`: predicted."""
        super().__init__(wait_s)
        self.wait_s = wait_s


class RouterCalls:
    """The routers of one site, for all requests."""

    def __init__(self, channels: Channels, routers: Routers, site: str) -> None:
        self._channels = channels
        self._routers = routers
        self.site = site

    def plans(self, remaining: Callable[[], float]) -> PlanStream:
        """The plans of one choice; `remaining` gives the seconds until the request's deadline."""
        return PlanStream(self, remaining)

    def order(self) -> list[str]:
        """The addresses of all, in the order in which to ask."""
        return self._routers.routers(self.site)

    async def gave_up(self, router: str) -> None:
        """This one does not plan, another may."""
        await self._routers.gave_up(self.site, router)

    def stub(self, router: str) -> router_pb2_grpc.RouterAsyncStub:
        """Calls to one of them."""
        return router_pb2_grpc.RouterStub(self._channels.to(router, "router"))

    async def hint(self, session: str, hint: ReturnHint) -> None:
        """Tells a router, which tells every store. Raises Unavailable when none can be reached."""
        message = wire.session_hint(session, hint)
        for router in (order := self.order()):
            try:
                await self.stub(router).Hint(message, timeout=_HINT_S, metadata=outgoing())
                return
            except grpc.aio.AioRpcError as error:
                if router == order[-1] or not _another_may(error):
                    raise public_error(error, "session hints cannot be passed on at the moment; try again") from error

    async def of_first(self, ask: AskRouter[Answer]) -> Answer:
        """The answer of the first router that can be reached. Raises PenstockError."""
        return (await self._answers(ask, most=1))[0]

    async def of_all(self, ask: AskRouter[Answer]) -> list[Answer]:
        """The answers of all routers that can be reached. Raises PenstockError when none can."""
        return await self._answers(ask, most=len(self.order()))

    async def _answers(self, ask: AskRouter[Answer], *, most: int) -> list[Answer]:
        answers: list[Answer] = []
        fault: PenstockError = Unavailable(_NO_ANSWER, code="unavailable", retry_after=1)
        for router in self.order():
            if len(answers) == most:
                break
            try:
                answers.append(await ask(self.stub(router)))
            except grpc.aio.AioRpcError as error:
                fault = public_error(error, _NO_ANSWER)
        if not answers:
            raise fault
        return answers

    async def evict(self, request: router_pb2.EvictRequest) -> list[router_pb2.MemberEvicted]:
        """Has the members of the mesh drop a tenant's blocks: one router tells them all. Raises PenstockError."""
        for router in (order := self.order()):
            try:
                answer = await self.stub(router).Evict(request, timeout=_EVICT_S, metadata=outgoing())
                return list(answer.members)
            except grpc.aio.AioRpcError as error:
                if router == order[-1] or not _another_may(error):
                    raise public_error(error, "no router passes the eviction on at the moment; try again") from error
        raise _no_plan()


class PlanStream:
    """One Plan stream at a time, made by `RouterCalls.plans`. When the router fails, another takes its place: with a
    later ask, or, as long as the workers go on, charged with what the first had planned."""

    def __init__(self, routers: RouterCalls, remaining: Callable[[], float]) -> None:
        self._routers = routers
        self._remaining = remaining
        self._call: _Call | None = None
        self._router = ""
        """The one that it leads to."""
        self._asked: tuple[ChoiceRequest, Assignment] | None = None
        """What the stream is charged with."""

    async def ask(
        self, request: ChoiceRequest, generated: int, avoid: Mapping[str, Reason], *, waits: bool = True
    ) -> Assignment:
        """Asks a router for workers, which replace those of an earlier plan; one that holds the request back answers
        later. Raises Overloaded, Unavailable, and the error with which the router refuses the request; without `waits`
        also HeldBack, after which `when_there_is_room` gives the plan.

        `generated` tokens of the answer exist; the members in `avoid` have not helped.
        """

        async def answer(call: _Call, patience_s: float) -> Assignment:
            said = await self._exchange(
                call, wire.plan_ask(request, generated, avoid, request.known_keys), patience_s, waits=waits
            )
            if said.keys_wanted:
                said = await self._exchange(call, wire.plan_ask(request, generated, avoid), patience_s, waits=waits)
            return wire.assignment(said)

        self._asked = None
        order = self._routers.order()
        if self._call is not None:
            try:
                return self._charged(request, await answer(self._call, _OTHERS_S if order[1:] else _PLAN_S))
            except grpc.aio.AioRpcError:
                pass
            except asyncio.InvalidStateError:
                if order[1:]:
                    await self._routers.gave_up(self._router)
                    order = self._routers.order()
            self._call.cancel()
        fault: PenstockError = _no_plan()
        for router in order:
            last = router == order[-1]
            call = self._open(router)
            try:
                return self._charged(request, await answer(call, _PLAN_S if last else _OTHERS_S))
            except grpc.aio.AioRpcError as error:
                fault = public_error(error, _NO_PLAN)
                if isinstance(fault, NotFound):  # the model exists, so its workers have left
                    fault = _no_plan()
                if last or not _another_may(error):
                    raise fault from error
                gone = not is_raised(error)
            except asyncio.InvalidStateError:
                gone = True
            call.cancel()
            if gone and not last:
                await self._routers.gave_up(router)
        raise fault

    async def when_there_is_room(
        self, request: ChoiceRequest, generated: int, avoid: Mapping[str, Reason]
    ) -> Assignment:
        """The plan of a router that has held the request back. Raises as `ask` does."""
        assert self._call is not None
        try:
            return self._charged(request, wire.assignment(await self._read(self._call)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return await self.ask(request, generated, avoid)

    @property
    def gone(self) -> bool:
        """Whether the router does not hear any more."""
        return self._call is not None and self._call.done()

    async def progress(self, generated: int) -> None:
        """Tells the router that the prompt is computed. Never fails: the router is not on the token path."""
        if self.gone:
            await self._move(generated)
        if self._call is None or self._call.done():
            return
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(wire.plan_progress(generated))

    async def _move(self, generated: int) -> None:
        """The router has gone, the workers have not: tries to find another that is charged with them."""
        if self._asked is None:
            return
        request, chosen = self._asked
        for router in self._routers.order():
            call = self._open(router)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                said = await self._exchange(call, wire.plan_kept(request, generated, chosen), _OTHERS_S)
                self._asked = request, replace(chosen, plan=said.plan)
                return
            call.cancel()

    def _open(self, router: str) -> _Call:
        self._router = router
        self._call = self._routers.stub(router).Plan(timeout=self._remaining(), metadata=outgoing())
        return self._call

    def _charged(self, request: ChoiceRequest, chosen: Assignment) -> Assignment:
        self._asked = request, chosen
        return chosen

    async def farewell(self, generated: int, hint: ReturnHint, *, waits_for_tool: bool) -> None:
        """Ends the stream properly: the router learns the length of the answer and the session's next move."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self.progress(generated)
                if self._call is None or self._call.done():
                    return
                await self._call.write(wire.plan_hint(hint, waits_for_tool=waits_for_tool))
                await self._call.done_writing()
                await self._call.read()

    def close(self) -> None:
        """Releases all charges."""
        if self._call is not None:
            self._call.cancel()

    async def _exchange(
        self, call: _Call, request: router_pb2.PlanRequest, patience_s: float, *, waits: bool = True
    ) -> router_pb2.PlanResponse:
        try:
            async with asyncio.timeout(patience_s) as patience:
                await call.write(request)
                answer = await self._read(call)
                if answer.HasField("held"):
                    if not waits:
                        raise HeldBack(answer.held.wait_s)
                    patience.reschedule(None)  # until the deadline of the call, which is the request's
                    answer = await self._read(call)
        except TimeoutError:
            raise asyncio.InvalidStateError("the router does not answer") from None
        return answer

    @staticmethod
    async def _read(call: _Call) -> router_pb2.PlanResponse:
        answer = await call.read()
        if not isinstance(answer, router_pb2.PlanResponse):
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                )
            raise asyncio.InvalidStateError("the router ended the stream without a plan")
        return answer


def _another_may(error: grpc.aio.AioRpcError) -> bool:
    """Whether another router may plan what this one did not."""
    return error.code() in _ANOTHER_MAY


def _no_plan() -> Unavailable:
    return Unavailable(_NO_PLAN, code="unavailable", retry_after=1)
