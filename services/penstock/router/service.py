"""The router's gRPC service: reads messages, keeps the planner's books, answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
import structlog

from penstock.errors import Internal, InvalidRequest, PenstockError, Unavailable
from penstock.kv.bounds import check_keys
from penstock.router import messages
from penstock.router.adapting import AdapterOrders
from penstock.router.balancing import Balancing, balanced
from penstock.router.config import RouterConfig
from penstock.router.directing import Director
from penstock.router.drafters import MOST_DRAFTERS, Drafters, DraftMember
from penstock.router.evicting import Evictions
from penstock.router.greeting import hello
from penstock.router.hints import Mailbox
from penstock.router.latest import Latest
from penstock.router.line import WaitingLine
from penstock.router.planner import Planner
from penstock.router.plans import Happened
from penstock.router.recent_plans import RecentPlans
from penstock.router.registry import RegistryView, Seat
from penstock.router.shared.opening import shared
from penstock.router.showing import Showing
from penstock.router.streams import PlanStreams
from penstock.router.yielding import YieldingLine
from penstock.rpc.identity import MemberIdentity, current_caller
from penstock.rpc.server import serve
from penstock.runtime.findings import Finding
from penstock.runtime.metrics import RouterMetrics
from penstock.runtime.redis_client import redis_found
from penstock.runtime.tasks import being_cancelled, beside, end, start
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

_Take = Callable[[router_pb2.JoinRequest], None]
Context = grpc.aio.ServicerContext[Any, Any]

_SERVICE = "penstock.v1.Router"
_TICK_S = 0.25
_GRACE_S = 0.2
"""Streams live as long as their callers do: waiting longer for their end would change nothing."""


class Router:
    """A running router. Made by `open_router`."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = ""
        self._config = config
        self.metrics = RouterMetrics()
        self.planner = Planner(config, clock, self._count_happened)
        self.line = WaitingLine(self.planner, config, clock)
        self.yielding = YieldingLine(self.planner, clock, most_held=config.max_held, most_live=config.max_live_plans)
        self.view: Latest[RegistryView] = Latest(RegistryView())
        self._clock = clock
        self.id = config.name or uuid4().hex
        self.recent = RecentPlans(config.max_recent_plans, clock)
        self.plans = PlanStreams(
            self.planner, self.line, self.yielding, self.metrics, router_id=self.id, tell=self._tell, recent=self.recent
        )
        self._mailboxes: dict[Seat, Mailbox] = {}
        self._drafters = Drafters(clock)
        self.shown = Showing(self.planner, self.line, self._drafters, clock, router_id=self.id)
        self.evictions = Evictions(self._mailboxes, self._drafters.mailboxes)
        self.adapting = AdapterOrders(self.planner.registry, self._mailboxes)
        self.director = Director(self.planner.registry, self._mailboxes.get, clock)
        self._log = structlog.get_logger("penstock.router")

    async def hold_seat(
        self, requests: AsyncIterator[router_pb2.JoinRequest]
    ) -> AsyncIterator[router_pb2.JoinResponse]:
        """One member's stream."""
        said = await hello(requests)
        with (self._drafts if said.role == router_pb2.ROLE_DRAFT else self._seated)(said) as (take, mailbox):
            read = partial(self._read, take, requests, mailbox)
            reader = start(read, name="member reader", on_failure="log", failed=self.metrics.task_failed)
            try:
                yield router_pb2.JoinResponse(
                    welcome=router_pb2.Welcome(router_id=self.id, takes_store_loads=True, takes_adapters=True)
                )
                async for message in mailbox.read():
                    yield message
            finally:
                await end(reader)

    def hint(self, request: common_pb2.HintRequest) -> None:
        """Passes hints on to every store; all or none. Raises InvalidRequest."""
        for hint in messages.hints(request):
            self._tell(hint)

    def _tell(self, hint: common_pb2.SessionHint | None) -> None:
        if hint is None or not hint.session:
            return
        self.metrics.hints.labels(common_pb2.SessionState.Name(hint.state).removeprefix("SESSION_STATE_").lower()).inc()
        message = router_pb2.JoinResponse(session_hint=hint)
        for seat, mailbox in self._mailboxes.items():
            if seat.member.role is None:
                mailbox.put(("session", hint.session), message)

    def _introduce(self) -> None:
        """Tells every store who the stores are."""
        message = messages.stores(sorted({store.address for store in self.planner.registry.stores()}))
        for seat, mailbox in self._mailboxes.items():
            if seat.member.role is None:
                mailbox.put("stores", message)

    async def watch(self, request: router_pb2.WatchRequest) -> AsyncIterator[router_pb2.MeshView]:
        """The served models and the silent members, at once and after each change. Raises Refused for a gateway of
        another wire."""
        with self.shown.watched(request):
            async for seen in self.view.follow():
                yield messages.view(seen)

    async def examine(self) -> Sequence[Finding]:
        """What `penstock ctl doctor` asks of a router."""
        state = self._config.state
        return [] if state == "memory" else [await redis_found("state", state)]

    async def keep_view(self) -> None:
        """Notices silence, which no message announces. A router that was away itself, stopped or starved, has heard
        nobody: that says nothing of them."""
        while True:
            began = self._clock()
            await asyncio.sleep(_TICK_S)
            now = self._clock()
            if (away_s := now - began - _TICK_S) > _TICK_S:
                self.planner.registry.forgive(away_s, now)
            self._refresh()

    @contextmanager
    def _seated(self, hello: router_pb2.Hello) -> Iterator[tuple[_Take, Mailbox]]:
        """A worker or store has a seat for the length of the block."""
        seat, mailbox = self._take_seat(hello)
        try:
            yield partial(self._take, seat), mailbox
        finally:
            self._leave_seat(seat)

    @contextmanager
    def _drafts(self, hello: router_pb2.Hello) -> Iterator[tuple[_Take, Mailbox]]:
        """A draft service is known for the length of the block."""
        with self._drafters.joined(hello) as (drafter, mailbox):
            try:
                yield partial(self._take_draft, drafter), mailbox
            finally:
                self.evictions.left(drafter)

    def _take_seat(self, hello: router_pb2.Hello) -> tuple[Seat, Mailbox]:
        try:
            member = messages.member(hello, current_caller())
            plan_key = messages.plan_key("hello.plan_key", hello.plan_key)
            adapters = messages.adapters("hello.adapters", hello.adapters)
            old = self.planner.registry.get(member.id)
            seat = self.planner.registry.join(member, self._clock())
        except PenstockError as error:
            self._log.warning("member refused", member=hello.member_id[:64], reason=error.message)
            raise
        seat.plan_key = plan_key
        if old is not None:
            self._mailboxes[old].end(Unavailable("a newer stream of this member has taken over"))
        self.planner.index.drop(member.id)
        self.planner.commons.welcome(seat)
        self.planner.registry.adapt(seat, adapters)
        mailbox = self._mailboxes[seat] = Mailbox()
        self.adapting.welcome(seat)
        self._log.info(
            "member joined", member=member.id, role=member.role.value if member.role else "kvstore", at=member.address
        )
        self._refresh()
        if member.role is None:
            self._introduce()
        return seat, mailbox

    def _leave_seat(self, seat: Seat) -> None:
        del self._mailboxes[seat]
        self.shown.forget(seat)
        self.evictions.left(seat)
        self.adapting.left(seat)
        self.director.stood()
        if self.planner.registry.leave(seat):
            self.planner.index.drop(seat.member.id)
            self.metrics.forget_bias(seat.member.id)
            self._log.info("member left", member=seat.member.id)
            self._refresh()
            if seat.member.role is None:
                self._introduce()

    async def _read(self, take: _Take, requests: AsyncIterator[router_pb2.JoinRequest], mailbox: Mailbox) -> None:
        """Takes what a member says, until its stream ends; tells the mailbox why."""
        try:
            async for request in requests:
                take(request)
        except PenstockError as error:
            mailbox.end(error)
        except asyncio.CancelledError:
            if being_cancelled():
                raise  # else the member has gone: that is how grpc says so
        except Exception:
            mailbox.end(Internal("internal error"))
            raise
        finally:
            mailbox.end()

    def _take(self, seat: Seat, request: router_pb2.JoinRequest) -> None:
        match request.WhichOneof("kind"):
            case "load":
                registry, now = self.planner.registry, self._clock()
                silent = registry.silent(seat, now)
                messages.hear(seat, request.load, now)
                self.shown.counted(seat, request.load.counts)
                self.planner.refresh()  # now, not when the next request waits for its plan
                self.plans.stir()
                if registry.silent(seat, now) is not silent:
                    what = "a worker gets on again" if silent else "a worker does not get on"
                    self._log.warning(what, member=seat.member.id)
                    self._refresh()
            case "blocks":
                self._index(seat, request.blocks)
            case "draining":
                seat.drain(request.draining)
                self._log.info("member drains" if request.draining else "member is back", member=seat.member.id)
                self._stood()
            case "role":
                role = messages.assign(self.planner.registry, seat, request.role)
                self._log.info("member has another role", member=seat.member.id, role=role.value)
                self._stood()
            case "store":
                self.shown.loaded(seat, request.store)
            case "evicted":
                self.evictions.heard(seat, request.evicted)
            case "adapters" if seat.member.role is not None:
                self.planner.registry.adapt(seat, messages.adapters("adapters", request.adapters.adapters))
                self._refresh()
            case "adapter_done":
                self.adapting.heard(seat, request.adapter_done)
            case "plan_key":
                seat.plan_key = messages.plan_key("plan_key", request.plan_key)
            case _:
                raise InvalidRequest(
                    "after the hello: load, blocks, draining, role, store, evicted, plan_key, adapters or adapter_done"
                )

    def _take_draft(self, drafter: DraftMember, request: router_pb2.JoinRequest) -> None:
        match request.WhichOneof("kind"):
            case "draft":
                self._drafters.loaded(drafter, request.draft)
            case "evicted":
                self.evictions.heard(drafter, request.evicted)
            case _:
                raise InvalidRequest("after the hello of a draft service: draft or evicted")

    def _stood(self) -> None:
        """A member wants other work than before."""
        self.director.stood()
        self._refresh()

    def _index(self, seat: Seat, events: common_pb2.BlockEvents) -> None:
        check_keys("blocks.stored", events.stored)
        check_keys("blocks.removed", events.removed)
        index, holder = self.planner.index, seat.member.id
        if events.snapshot:
            index.drop(holder)
        index.stored(holder, events.stored)
        index.removed(holder, events.removed)
        self.metrics.indexed.set(len(index))

    def _count_happened(self, happened: Happened) -> None:
        self.metrics.count_happened(
            happened.what,
            happened.member,
            predicted_s=happened.predicted_s,
            ratio=happened.ratio,
            bias=happened.bias,
        )

    def _refresh(self) -> None:
        self.plans.stir()
        self.view.set(self.planner.registry.view(self._clock()))
        for role, count in self.planner.registry.count().items():
            self.metrics.members.labels(role).set(count)
        self.metrics.indexed.set(len(self.planner.index))


class _Servicer(router_pb2_grpc.RouterServicer):
    def __init__(self, router: Router) -> None:
        self._router = router

    def Join(
        self, request_iterator: AsyncIterator[router_pb2.JoinRequest], context: Context
    ) -> AsyncIterator[router_pb2.JoinResponse]:
        return self._router.hold_seat(request_iterator)

    def Plan(
        self, request_iterator: AsyncIterator[router_pb2.PlanRequest], context: Context
    ) -> AsyncIterator[router_pb2.PlanResponse]:
        return self._router.plans.hold(request_iterator)

    async def Hint(self, request: common_pb2.HintRequest, context: Context) -> common_pb2.HintResponse:
        self._router.hint(request)
        return common_pb2.HintResponse()

    def Watch(self, request: router_pb2.WatchRequest, context: Context) -> AsyncIterator[router_pb2.MeshView]:
        return self._router.watch(request)

    async def Members(self, request: router_pb2.MembersRequest, context: Context) -> router_pb2.MembersResponse:
        return self._router.shown.members(self._router.director.members())

    async def Command(self, request: router_pb2.CommandRequest, context: Context) -> router_pb2.CommandResponse:
        return router_pb2.CommandResponse(member=await self._router.director.command(request))

    async def Sessions(self, request: router_pb2.SessionsRequest, context: Context) -> router_pb2.SessionsResponse:
        return self._router.shown.sessions(request)

    async def Plans(self, request: router_pb2.PlansRequest, context: Context) -> router_pb2.PlansResponse:
        return self._router.recent.found(request)

    async def ChangeAdapter(self, request: router_pb2.AdapterRequest, context: Context) -> router_pb2.AdapterResponse:
        return await self._router.adapting.change(request)

    async def Evict(self, request: router_pb2.EvictRequest, context: Context) -> router_pb2.EvictResponse:
        return await self._router.evictions.evict(request)


@asynccontextmanager
async def open_router(config: RouterConfig) -> AsyncIterator[Router]:
    """A router that serves until the block ends."""
    router = Router(config, time.monotonic)
    calls = 2 * (config.max_live_plans + config.max_held) + 2 * config.max_members + MOST_DRAFTERS + 64

    def register(server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(_Servicer(router), server)

    async with serve(
        config.address,
        register,
        [_SERVICE],
        max_calls=calls,
        grace=_GRACE_S,
        examine=router.examine,
        member=MemberIdentity.of(config.member_tls, "router"),
    ) as server:
        router.address = config.address.at(server.port)
        failed = router.metrics.task_failed
        balancing = Balancing(router.planner, router.director, config, time.monotonic)
        async with (
            beside(router.keep_view, name="mesh view", on_failure="restart", failed=failed),
            beside(router.plans.keep_line, name="line", on_failure="restart", failed=failed),
            balanced(balancing, failed, on=config.balance),
            shared(config, router.planner.commons, router.id, metrics=router.metrics, clock=time.monotonic),
        ):
            await server.set_serving(True)
            yield router
