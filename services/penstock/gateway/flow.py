"""The life of one choice in the mesh: plan, prefill and decode side by side, fail-over.

Tokens are merged by index: the first comes from prefill, the others from decode, and whichever worker computes a
token again (a hand-off that failed, a worker that took over) sends what is already there. Sampling is a function of
(seed, position), so that what comes again is the same, and is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from penstock.errors import PenstockError, Unavailable
from penstock.gateway.faults import blames_member, public_error
from penstock.gateway.peers import Peers
from penstock.gateway.planner import Planner, Remaining
from penstock.rpc.context import outgoing
from penstock.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, router_pb2

_FINISH = {common_pb2.FINISH_STOP: "stop", common_pb2.FINISH_LENGTH: "length"}
_REPLAN_PAUSE_S = (0.0, 0.0, 0.2, 1.0)


@dataclass(slots=True)
class Account:
    """What a choice cost."""

    cache: common_pb2.CacheUse | None = None
    """Of the worker that computed the prompt first."""
    drafted: int = 0
    accepted: int = 0
    times: dict[str, float] = field(default_factory=dict)
    replans: int = 0
    retained: common_pb2.Retained = field(default_factory=common_pb2.Retained)
    """What was promised to be kept, as last reported."""


class _Ended(Exception):
    """The choice is complete; whatever still runs for it is to stop."""


class _MemberFailed(Exception):
    """Workers that failed; others may do."""

    def __init__(self, members: Sequence[str], error: PenstockError) -> None:
        super().__init__(error.message)
        self.members = members
        self.error = error


class Flow:
    """One choice on its way. `run` once."""

    def __init__(
        self,
        planner: Planner,
        peers: Peers,
        request: common_pb2.Request,
        ask: router_pb2.PlanAsk,
        accept: Callable[[common_pb2.Token], bool],
        remaining: Remaining,
        max_replans: int,
    ) -> None:
        """`accept` is given each token once, in order, and answers whether the choice ends with it."""
        self.account = Account()
        self._planner = planner
        self._peers = peers
        self._request = request
        self._ask = ask
        self._accept = accept
        self._remaining = remaining
        self._max_replans = max_replans
        self._tokens: list[int] = []
        self._early: dict[int, common_pb2.Token] = {}
        self._finish: str | None = None
        self._prefill_failed = False
        self._start = 0
        self._drafted = (0, 0)
        self._log = structlog.get_logger("penstock.gateway")

    async def run(self) -> str:
        """Runs the choice to its end: stop or length. Raises PenstockError when it can't be had.

        Plans, executes, and does so again with other workers when one fails. Being cancelled ends every call to a
        worker; `close` then ends the plan.
        """
        failed: PenstockError | None = None
        for attempt in range(self._max_replans + 1):
            await asyncio.sleep(_REPLAN_PAUSE_S[min(attempt, len(_REPLAN_PAUSE_S) - 1)])
            try:
                return await self._execute(await self._plan())
            except _MemberFailed as fault:
                failed = fault.error
                self._ask.avoid.extend(member for member in fault.members if member not in self._ask.avoid)
            except Unavailable as error:
                if attempt == 0:
                    raise
                failed = error
            self.account.replans += 1
            self._log.warning("worker failed, replanning", avoid=list(self._ask.avoid), tokens=len(self._tokens))
        raise failed or _unavailable()

    async def farewell(self, hint: common_pb2.SessionHint) -> None:
        """When all is said: tells the router how long the answer was, and what the session does next."""
        await self._planner.farewell(len(self._tokens), hint)

    def close(self) -> None:
        """Releases the plan."""
        self._planner.close()

    async def _plan(self) -> router_pb2.PlanResponse:
        begin = time.perf_counter()
        self._ask.output_tokens = len(self._tokens)
        plan = await self._planner.ask(self._ask)
        self.account.times["plan"] = self.account.times.get("plan", 0.0) + time.perf_counter() - begin
        self._request.output_ids[:] = self._tokens
        self._early.clear()
        return plan

    async def _execute(self, plan: router_pb2.PlanResponse) -> str:
        """Runs the workers of a plan until the choice is complete. Raises _MemberFailed or a PenstockError."""
        self._start, self._finish = len(self._tokens), None
        self._drafted = self.account.drafted, self.account.accepted
        self._prefill_failed = not plan.HasField("prefill")
        work = [self._decode(plan)]
        if plan.HasField("prefill"):
            work.append(self._prefill(plan))
        fault = await _first_fault(work)
        if fault is not None and not isinstance(fault, _Ended):
            raise fault
        if self._finish is None:
            raise _MemberFailed([plan.decode.member_id], _unavailable())
        return self._finish

    async def _prefill(self, plan: router_pb2.PlanResponse) -> None:
        """The first token. When it can't be had, the decode worker computes the prompt itself."""
        request = prefill_pb2.PrefillRequest(request=self._request, epoch=plan.epoch)
        request.request.sources[:] = plan.prefill.sources
        try:
            async with self._peers.at(plan.prefill.address) as channel:
                call = prefill_pb2_grpc.PrefillStub(channel).Prefill(
                    request, timeout=self._remaining(), metadata=outgoing()
                )
                try:
                    event = await _last_prefill_event(call)
                finally:
                    call.cancel()
        except (grpc.aio.AioRpcError, Unavailable) as error:
            self._fail_prefill(plan.prefill.member_id, error)
            return
        self._charge(event.cache, event.times)
        self._keep(event)
        self._add([event.token], event.finish)
        await self._planner.progress(True, len(self._tokens))

    def _fail_prefill(self, member: str, error: grpc.aio.AioRpcError | Unavailable) -> None:
        if isinstance(error, grpc.aio.AioRpcError) and not blames_member(error):
            raise public_error(error, "")
        self._log.warning("prefill failed", member=member, error=str(error.__class__.__name__))
        self._ask.avoid.append(member)
        self._prefill_failed = True
        self._check_gap()

    async def _decode(self, plan: router_pb2.PlanResponse) -> None:
        """All other tokens, or all."""
        request = decode_pb2.GenerateRequest(request=self._request)
        request.request.sources[:] = plan.decode.sources
        handed_over = plan.HasField("prefill")
        if handed_over:
            request.handoff.address, request.handoff.epoch = plan.prefill.address, plan.epoch
        try:
            async with self._peers.at(plan.decode.address) as channel:
                call = decode_pb2_grpc.DecodeStub(channel).Generate(
                    request, timeout=self._remaining(), metadata=outgoing()
                )
                try:
                    await self._read_decode(call, handed_over)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            fault = public_error(error, _unavailable().message)
            raise (_MemberFailed([plan.decode.member_id], fault) if blames_member(error) else fault) from error

    async def _read_decode(self, call: AsyncIterable[decode_pb2.GenerateEvent], handed_over: bool) -> None:
        told = handed_over
        async for event in call:
            self._count(event, own_prefill=event.handoff_failed or not handed_over)
            self._keep(event)
            self._add(event.tokens, event.finish)
            if not told and self._tokens:
                told = True
                await self._planner.progress(True, len(self._tokens))

    def _add(self, tokens: Sequence[common_pb2.Token], finish: common_pb2.Finish.ValueType) -> None:
        """Takes tokens in any order, hands them on in theirs. Raises _Ended with the last one."""
        for token in tokens:
            if token.index >= len(self._tokens):
                self._early[token.index] = token
        while len(self._tokens) in self._early:
            token = self._early.pop(len(self._tokens))
            self._tokens.append(token.id)
            if self._accept(token):
                self._finish = "stop"
                raise _Ended
        self._finish = _FINISH.get(finish, self._finish)
        if self._finish is not None and not self._early and len(self._tokens) > self._start:
            raise _Ended
        self._check_gap()

    def _check_gap(self) -> None:
        """A token that prefill took with it will never come: only another plan helps."""
        missing = self._early or (self._finish is not None and len(self._tokens) == self._start)
        if missing and self._prefill_failed:
            raise _MemberFailed([], _unavailable())

    def _count(self, event: decode_pb2.GenerateEvent, own_prefill: bool) -> None:
        if own_prefill and event.HasField("cache"):
            self._charge(event.cache, event.times)
        if event.HasField("times"):
            self.account.times["decode"] = self.account.times.get("decode", 0.0) + event.times.decode
        self.account.drafted = self._drafted[0] + event.drafted
        self.account.accepted = self._drafted[1] + event.accepted

    def _keep(self, event: prefill_pb2.PrefillEvent | decode_pb2.GenerateEvent) -> None:
        """Prefill and decode may report in either order; the one that speaks of more blocks knows more."""
        if event.HasField("retained") and event.retained.blocks >= self.account.retained.blocks:
            self.account.retained = event.retained

    def _charge(self, cache: common_pb2.CacheUse, times: common_pb2.StageTimes) -> None:
        """The prompt is charged once: to the worker that first computed it."""
        if self.account.cache is None:
            self.account.cache = cache
            self.account.times |= {"queue": times.queue, "fetch": times.fetch, "prefill": times.prefill}


def _unavailable() -> Unavailable:
    return Unavailable("the workers of the request failed; try again", code="unavailable", retry_after=1)


async def _last_prefill_event(call: AsyncIterable[prefill_pb2.PrefillEvent]) -> prefill_pb2.PrefillEvent:
    async for event in call:
        if event.HasField("token"):
            return event
    raise Unavailable("prefill ended without a token")


async def _first_fault(work: Sequence[Coroutine[Any, Any, None]]) -> BaseException | None:
    """Runs `work` side by side until one of it raises, which it gives back, or all have returned.

    Not a TaskGroup: when a child of one fails while the group is left, Python 3.11 counts that as a cancellation
    of the parent, and one from outside, a client that has gone, is lost in it.
    """
    tasks = [asyncio.create_task(one) for one in work]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            faults = [error for task in done if (error := _fault(task)) is not None]
            if faults:
                return min(faults, key=_rank)
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fault(task: asyncio.Task[None]) -> BaseException | None:
    """What a task ended with. grpc.aio tells of a call that was torn down under it as of a cancellation."""
    return _MemberFailed([], _unavailable()) if task.cancelled() else task.exception()


def _rank(error: BaseException) -> int:
    """Of errors that came together: the end of the choice first, a worker's failure last."""
    return 0 if isinstance(error, _Ended) else 2 if isinstance(error, _MemberFailed) else 1
