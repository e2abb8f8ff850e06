"""The life of one choice in the mesh: one plan after another until one is carried out to its end.

A request that lost its workers, or finds no workers, waits for others: until its deadline or, where its client has set
none, for at most `failover_s` until a decode worker gives a token again. So a restart of a worker or of the router
costs a pause. Only a refusal for overload is passed on at once, and only before the first token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from penstock.errors import Internal, Overloaded, PenstockError, Unavailable
from penstock.gateway.completing.account import ChoiceAccount, TriedPlan
from penstock.gateway.completing.attempt import Attempt
from penstock.gateway.request.work import Assignment, ChoiceRequest, Finish, Lost, Reason, Receiver, SampledToken
from penstock.kv.hint import ReturnHint
from penstock.runtime.tasks import alongside, first_of

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_FIRST_REPORT_S, _LONGEST_REPORT_S = 1.0, 8.0
"""Seconds between two reports to the router; twice as many each time."""
_MOST_NOTED = 16
"""Attempts of one request whose fate is kept."""
_MOST_DEFECTS = 3
"""Internal errors of workers, none of which has decoded a token, after which it is the request that causes them."""
_MOST_AVOIDED = 32
"""Most members that one request avoids: those that failed it last."""


class Plans(Protocol):
    """The router's side of one choice; see PlanStream."""

    @property
    def gone(self) -> bool: ...

    async def ask(self, request: ChoiceRequest, generated: int, avoid: Mapping[str, Reason]) -> Assignment: ...

    async def progress(self, generated: int) -> None: ...

    async def farewell(self, generated: int, hint: ReturnHint, *, waits_for_tool: bool) -> None: ...

    def close(self) -> None: ...


class ChoiceCalls(Protocol):
    """The workers' side of one choice; see Workers."""

    def prefill(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver
    ) -> Coroutine[Any, Any, None]: ...

    def decode(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver
    ) -> Coroutine[Any, Any, None]: ...


Grown = Callable[[ChoiceRequest, Sequence[int]], ChoiceRequest]
"""A request whose answer has begun with these tokens."""


class Flow:
    """Takes one choice through the mesh. Call `run` once."""

    def __init__(
        self,
        request: ChoiceRequest,
        plans: Plans,
        workers: ChoiceCalls,
        accept: Callable[[SampledToken], bool],
        *,
        hopeful: Callable[[float], Awaitable[None]],
        failover_s: float,
        grown: Grown,
        taken: Callable[[], None] = lambda: None,
    ) -> None:
        """`accept` is given each token once, in order, and answers whether the choice ends with it. `hopeful` waits,
        for at least the given seconds, until workers may be found: RouterView.hopeful. `taken` is called with each
        plan. `grown` names the blocks of an answer too, for routers."""
        self.account = ChoiceAccount()
        self._request = request
        self._plans = plans
        self._workers = workers
        self._accept = accept
        self._hopeful = hopeful
        self._failover_s = failover_s
        self._taken = taken
        self._grown = grown
        self._tokens: list[int] = []
        self._avoid: dict[str, Reason] = {}
        self._lost_at: float | None = None
        """When the choice lost its workers; None while it has workers."""
        self._pause = _FIRST_PAUSE_S
        self._defects = 0
        """How often workers have failed by a defect since one of them decoded a token."""
        self._log = structlog.get_logger("penstock.gateway")

    async def run(self) -> Finish:
        """Runs the choice to its end. Raises PenstockError when it cannot be completed.

        Being cancelled ends every call to a worker; `close` then ends the plan.
        """
        lost: Lost | None = None
        while True:
            chosen = await self._plan(lost)
            ended = await self._execute(chosen)
            if not isinstance(ended, Lost):
                return ended
            lost = ended
            self._note_loss(lost)
            self._count_defect(lost)
            self.account.replans += 1
            self._request = replace(self._request, interrupted=True)
            self._avoid_member(lost)
            self._log.warning("worker failed, replanning", avoid=list(self._avoid), tokens=len(self._tokens))

    @property
    def recalled(self) -> Sequence[int]:
        """The tokens of `recall`, before `run`."""
        return self._tokens

    def recall(self, tokens: Sequence[int], *, interrupted: bool) -> None:
        """The answer begins with these tokens, which workers have generated before; `interrupted` says that something
        of the mesh failed then. Call it before `run`."""
        self._request = replace(self._request, interrupted=interrupted)
        self._tokens.extend(tokens)
        self.account.recalled = len(tokens)

    async def farewell(self, hint: ReturnHint, *, waits_for_tool: bool) -> None:
        """Closes the plan: tells the router the answer's length and the session's next move."""
        await self._plans.farewell(len(self._tokens), hint, waits_for_tool=waits_for_tool)

    def close(self) -> None:
        """Releases the plan."""
        self._plans.close()

    async def _plan(self, lost: Lost | None) -> Assignment:
        """The next plan: at once after the first loss, later when workers may be found. Raises the final error."""
        begin = time.perf_counter()
        if lost is not None and self._lost_at is not None:
            await self._wait(lost.error)
        elif lost is not None:
            self._lost_at = time.monotonic()
        request = self._grown(self._request, self._tokens)
        refused = lost.error if lost is not None and isinstance(lost.error, Overloaded) and not self._tokens else None
        while True:
            try:
                chosen = await self._plans.ask(request, len(self._tokens), self._avoid)
                break
            except (Unavailable, Overloaded) as error:
                fresh = lost is None and not (self._tokens and self._request.interrupted)
                if refused is not None or (fresh and isinstance(error, Overloaded)):
                    raise refused or error from None
                await self._wait(error)
        if refused is not None and chosen.decode.member in self._avoid:
            raise refused  # like every other worker that there is
        self._note(TriedPlan(chosen, begin, time.perf_counter(), len(self._tokens)))
        return chosen

    def _note(self, trial: TriedPlan) -> None:
        self._taken()
        if len(self._tokens) == self.account.recalled:
            self.account.planned_at = trial.planned_at
        if len(self.account.attempts) < _MOST_NOTED:
            self.account.attempts.append(trial)

    def _note_loss(self, lost: Lost) -> None:
        if len(self.account.attempts) == self.account.replans + 1:  # else it was one too many to be noted
            self.account.attempts[-1].lost, self.account.attempts[-1].lost_at = lost, time.perf_counter()

    def _count_defect(self, lost: Lost) -> None:
        """Raises the error of a request that makes one worker fail after the other, and the steps of others with it."""
        if not isinstance(lost.error, Internal):
            return
        self._defects += 1
        if self._defects == _MOST_DEFECTS:
            raise lost.error

    async def _wait(self, error: PenstockError) -> None:
        """Waits until another plan may succeed. Raises `error` when that takes too long."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        try:
            async with asyncio.timeout(max(0.0, self._lost_at + self._failover_s - now)):
                await self._hopeful(self._pause)
        except TimeoutError:
            raise error from None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    async def _execute(self, chosen: Assignment) -> Finish | Lost:
        """Runs the workers of a plan until the choice is complete, or these workers cannot complete it."""
        attempt = Attempt(self._request, chosen, self._tokens, self.account, self._accept)
        output = tuple(self._tokens)
        calls = [self._workers.decode(self._request, chosen, output, attempt)]
        if chosen.prefill is not None:
            calls.insert(0, self._workers.prefill(self._request, chosen, output, attempt))
        async with alongside(*calls, over=attempt.over):
            await attempt.begun()
            await self._report(attempt)
            ended = await attempt.ended()
        if attempt.lost_prefill is not None:
            self._avoid_member(attempt.lost_prefill)
        if attempt.decoded:  # prefill alone would go on for ever, token by token
            self._lost_at, self._pause, self._defects = None, _FIRST_PAUSE_S, 0
        return ended

    async def _report(self, attempt: Attempt) -> None:
        """Tells the router that the prompt is computed, and then from time to time how long the answer is, until the
        attempt ends."""
        pause, told = _FIRST_REPORT_S, -1
        while attempt.running:
            if len(self._tokens) > told:
                told = len(self._tokens)
                if self._plans.gone:  # another router has to be found, which holds up no end
                    await first_of(self._plans.progress(told), attempt.ends())
                else:
                    await self._plans.progress(told)
            await attempt.ends_within(pause)
            pause = min(2 * pause, _LONGEST_REPORT_S)

    def _avoid_member(self, lost: Lost) -> None:
        if lost.member and self._avoid.get(lost.member) != "failed":
            self._avoid[lost.member] = lost.reason
            if len(self._avoid) > _MOST_AVOIDED:
                del self._avoid[next(iter(self._avoid))]
