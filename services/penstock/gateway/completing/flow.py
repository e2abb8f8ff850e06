"""The life of one choice in the mesh: plan, prefill and decode side by side, fail-over.

Tokens are merged by index: the first comes from prefill, the others from decode. After a failed hand-off, or when
another worker takes over, tokens may arrive a second time. Sampling is a function of (seed, position), so they are the
same tokens, and are dropped.

A request that lost its workers, or finds no workers, waits for others, for at most `failover_s` until a decode worker
gives a token again, so a restart of a worker or of the router costs a pause. Only a refusal for overload is passed on
at once, and only before the first token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from penstock.errors import Overloaded, PenstockError, Unavailable
from penstock.gateway.request.work import (
    Assignment,
    ChoiceRequest,
    Finish,
    Gain,
    Lost,
    Promised,
    PromptUse,
    Report,
    SampledToken,
    workers_failed,
)
from penstock.kv.hint import ReturnHint
from penstock.runtime.tasks import merged

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_MOST_NOTED = 16
"""Attempts of one request whose fate is kept."""
_MOST_AVOIDED = 32
"""Most members that one request avoids: those that failed it last."""


class Plans(Protocol):
    """The router's side of one choice; see PlanStream."""

    async def ask(self, request: ChoiceRequest, generated: int, avoid: Sequence[str]) -> Assignment: ...

    async def progress(self, generated: int) -> None: ...

    async def farewell(self, generated: int, hint: ReturnHint, *, waits_for_tool: bool) -> None: ...

    def close(self) -> None: ...


class ChoiceCalls(Protocol):
    """The workers' side of one choice; see Workers."""

    def prefill(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int]
    ) -> AsyncGenerator[Report, None]: ...

    def decode(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int]
    ) -> AsyncGenerator[Report, None]: ...


@dataclass(slots=True)
class TriedPlan:
    """One attempt, for those who ask later what became of a request."""

    chosen: Assignment
    asked_at: float
    """`time.perf_counter`, like all times here."""
    planned_at: float
    start: int
    """Number of tokens of the answer when it began."""
    lost: Lost | None = None
    """How it failed."""
    lost_at: float = 0.0


@dataclass(slots=True)
class ChoiceAccount:
    """The cost of a choice, as its workers counted it."""

    use: PromptUse | None = None
    """The count of the first worker that computed the prompt; None until one has reported."""
    defects: int = 0
    """Reports whose token count differs from the number of tokens that the worker was given."""
    drafted: int = 0
    accepted: int = 0
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, of the worker whose count of the prompt is `use`."""
    planned_at: float | None = None
    """`time.perf_counter` at the last plan before the first token."""
    decoding_at: float | None = None
    """The same at the first token that came from a decode worker."""
    attempts: list[TriedPlan] = field(default_factory=list)
    """The first of them."""
    replans: int = 0
    promised: Promised = field(default_factory=Promised)
    """The store's promise, as last reported."""


@dataclass(slots=True)
class _Attempt:
    """The state of one plan while it is carried out."""

    chosen: Assignment
    start: int
    """Number of tokens of the answer when the attempt began."""
    drafted: int
    """Tokens drafted in earlier attempts; `accepted` is counted likewise."""
    accepted: int
    early: dict[int, SampledToken] = field(default_factory=dict)
    """Tokens whose predecessors are missing."""
    finish: Finish | None = None
    no_prefill: bool = False
    """No token will come from a prefill worker."""
    told: bool = False
    """The router knows that the prompt is computed."""
    lost: Lost | None = None
    """The loss with which the attempt will end."""


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
    ) -> None:
        """`accept` is given each token once, in order, and answers whether the choice ends with it. `hopeful` waits,
        for at least the given seconds, until workers may be found: RouterView.hopeful."""
        self.account = ChoiceAccount()
        self._request = request
        self._plans = plans
        self._workers = workers
        self._accept = accept
        self._hopeful = hopeful
        self._failover_s = failover_s
        self._tokens: list[int] = []
        self._avoid: list[str] = []
        self._lost_at: float | None = None
        """When the choice lost its workers; None while it has workers."""
        self._pause = _FIRST_PAUSE_S
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
            self.account.replans += 1
            self._avoid_member(lost.member)
            self._log.warning("worker failed, replanning", avoid=list(self._avoid), tokens=len(self._tokens))

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
        refused = lost.error if lost is not None and isinstance(lost.error, Overloaded) and not self._tokens else None
        while True:
            try:
                chosen = await self._plans.ask(self._request, len(self._tokens), self._avoid)
                break
            except (Unavailable, Overloaded) as error:
                if refused is not None or (lost is None and isinstance(error, Overloaded)):
                    raise refused or error from None
                await self._wait(error)
        if refused is not None and chosen.decode.member in self._avoid:
            raise refused  # like every other worker that there is
        self._note(TriedPlan(chosen, begin, time.perf_counter(), len(self._tokens)))
        return chosen

    def _note(self, trial: TriedPlan) -> None:
        if not self._tokens:
            self.account.planned_at = trial.planned_at
        if len(self.account.attempts) < _MOST_NOTED:
            self.account.attempts.append(trial)

    def _note_loss(self, lost: Lost) -> None:
        if len(self.account.attempts) == self.account.replans + 1:  # else it was one too many to be noted
            self.account.attempts[-1].lost, self.account.attempts[-1].lost_at = lost, time.perf_counter()

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
        account, output = self.account, tuple(self._tokens)
        attempt = _Attempt(chosen, len(output), account.drafted, account.accepted, no_prefill=chosen.prefill is None)
        calls = [self._workers.decode(self._request, chosen, output)]
        if chosen.prefill is not None:
            calls.insert(0, self._workers.prefill(self._request, chosen, output))
        async with aclosing(merged(*calls)) as reports:
            async for report in reports:
                if isinstance(report, Lost):
                    self._lose(attempt, report)
                elif (finish := self._take(attempt, report)) is not None:
                    return finish
                elif len(self._tokens) > attempt.start and not attempt.told:
                    attempt.told = True
                    await self._plans.progress(len(self._tokens))
                if (lost := self._over(attempt)) is not None:
                    return lost
        return attempt.lost or Lost("decode", chosen.decode.member, workers_failed())

    def _lose(self, attempt: _Attempt, lost: Lost) -> None:
        """Takes note of a loss. Without prefill the decode worker computes the prompt itself: unless prefill fell
        silent, then decode waits for a hand-off that is as silent."""
        if lost.stage == "decode":
            attempt.lost = lost
            return
        self._log.warning("prefill failed", member=lost.member, error=lost.error.message, silent=lost.silent)
        self._avoid_member(lost.member)
        attempt.no_prefill = True
        if lost.silent and len(self._tokens) == attempt.start:
            attempt.lost = attempt.lost or lost

    def _over(self, attempt: _Attempt) -> Lost | None:
        """The loss that ends the attempt because only another plan helps; None while the attempt can go on."""
        if attempt.no_prefill and (attempt.early or attempt.finish):
            return attempt.lost or Lost("prefill", "", workers_failed())  # it took a token with it
        # While early tokens wait for prefill's, which was sampled before them and is on its way, the loss can wait.
        return None if attempt.early else attempt.lost

    def _take(self, attempt: _Attempt, gain: Gain) -> Finish | None:
        """Counts the report and hands its tokens on in order; returns how the choice ended, or None."""
        self._count(attempt, gain)
        for token in gain.tokens:
            if token.index >= len(self._tokens):
                attempt.early[token.index] = token
        while (following := attempt.early.pop(len(self._tokens), None)) is not None:
            self._tokens.append(following.id)
            if gain.stage == "decode":  # prefill alone would go on for ever, token by token
                self._lost_at, self._pause = None, _FIRST_PAUSE_S
            if self._accept(following):
                return "stop"
        attempt.finish = gain.finish or attempt.finish
        return None if attempt.early or len(self._tokens) == attempt.start else attempt.finish

    def _count(self, attempt: _Attempt, gain: Gain) -> None:
        account = self.account
        if gain.use is not None:
            self._charge(attempt, gain.use, gain)
        if account.decoding_at is None and gain.stage == "decode" and gain.tokens:
            account.decoding_at = time.perf_counter()
        if gain.drafted is not None and gain.accepted is not None:
            account.drafted = attempt.drafted + gain.drafted
            account.accepted = attempt.accepted + gain.accepted
        # Prefill and decode may report in either order; the one that speaks of more blocks knows more.
        if gain.promised is not None and gain.promised.blocks >= account.promised.blocks:
            account.promised = gain.promised

    def _charge(self, attempt: _Attempt, use: PromptUse, gain: Gain) -> None:
        """Checks a worker's count of the tokens that it was given. The prompt is charged once, by the first report."""
        given = len(self._request.prompt_ids) + attempt.start
        if use.total != given:
            self.account.defects += 1
            self._log.error(
                "usage does not add up", stage=gain.stage, given=given, computed=use.computed, cached=dict(use.cached)
            )
        if self.account.use is None:
            self.account.use = use
            self.account.times |= {stage: gain.times.get(stage, 0.0) for stage in ("queue", "fetch", "prefill")}

    def _avoid_member(self, member: str) -> None:
        if member and member not in self._avoid:
            self._avoid.append(member)
            del self._avoid[:-_MOST_AVOIDED]
