"""The router's `Plan` streams: one per request, from its ask to its end, and the line of those held back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from msgspec.structs import replace

from penstock.errors import InvalidRequest, PenstockError
from penstock.router import messages
from penstock.router.hints import LiveSessions
from penstock.router.line import TICK_S, TURN_S, HeldAsk, WaitingLine
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk, Planned
from penstock.router.recent_plans import RecentPlans
from penstock.router.yielding import YieldingLine
from penstock.runtime.metrics import RouterMetrics
from penstock.v1 import common_pb2, router_pb2

_EPOCH_BITS = 30


def _first_epoch() -> int:
    """Where a stream begins to count its plans: somewhere else than those before it, which may have been of the same
    request. All are equally long on the wire."""
    return secrets.randbits(_EPOCH_BITS) | 1 << _EPOCH_BITS


class PlanStreams:
    """Owner of the streams: whatever a stream has charged or holds in the line is given back when it ends."""

    def __init__(
        self,
        planner: Planner,
        line: WaitingLine,
        yielding: YieldingLine,
        metrics: RouterMetrics,
        *,
        router_id: str,
        tell: Callable[[common_pb2.SessionHint | None], None],
        recent: RecentPlans,
    ) -> None:
        """`tell` passes on what sessions say of themselves, or what follows from their requests' begin and end."""
        self._planner = planner
        self._line = line
        self._yielding = yielding
        self._metrics = metrics
        self._router_id = router_id
        self._tell = tell
        self._recent = recent
        self._live = LiveSessions()
        self._stirred = asyncio.Event()

    async def hold(self, requests: AsyncIterator[router_pb2.PlanRequest]) -> AsyncIterator[router_pb2.PlanResponse]:
        """One request's stream: its charge is released when the stream ends, however it ends."""
        number: int | None = None
        held: HeldAsk | None = None
        ask: PlanAsk | None = None
        session: str | None = None
        blamed: frozenset[str] = frozenset()
        last_words: common_pb2.SessionHint | None = None
        epoch = _first_epoch()
        generated = 0
        ended = False
        try:
            async for request in requests:
                if request.HasField("ask"):
                    if number is not None:
                        self._release(number)
                        number = None
                    ask = replace(messages.ask(request.ask), blamed=blamed)
                    if session is None:
                        session = ask.session
                        self._tell(self._live.begin(session))
                    if ask.kept is not None:
                        number = self._yielding.keep(ask.kept) if ask.yields else self._planner.keep(ask, ask.kept)
                        epoch += 1
                        yield messages.kept(ask.kept, epoch, self._name(number))
                        continue
                    whole = self._planner.recall(ask)
                    if whole is None:
                        yield messages.keys_wanted()
                        continue
                    blamed |= ask.avoid - ask.full
                    answered = asyncio.Event()
                    found = self._enter(whole, answered.set)
                    if isinstance(found, HeldAsk):
                        held = found
                        yield messages.held_back(held)
                        await answered.wait()
                        found, held = self._outcome(held), None
                    planned, number = found, found.number
                    self._count_plan(planned)
                    self._recent.add(self._name(number), planned)
                    epoch += 1
                    yield messages.plan(planned, ask, epoch, self._name(number), self._plan_key)
                elif number is None:
                    raise InvalidRequest("ask first")
                elif request.HasField("hint"):
                    last_words = messages.hint(request.hint)
                else:
                    generated = max(generated, request.progress.generated)
                    self._progress(number, request.progress)
            ended = True
        finally:
            if ask is not None and not ask.yields:  # a batch's answers say nothing of how long others will be
                self._planner.learn(ask, generated, ended=ended)
            if held is not None:
                self._abandon(held)
            if number is not None:
                self._release(number)
            if session is not None:
                self._tell(self._live.end(session, last_words))

    async def keep_line(self) -> None:
        """Lets those in whose turn it is, when something has changed, and now and then for those who wait too long."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stirred.wait()
            self._stirred.clear()
            again = len(self._line) > 0 and self._line.turn()
            if (len(self._yielding) and self._yielding.turn()) or again:
                self._stirred.set()
            self._count_waiting()
            await asyncio.sleep(TURN_S)

    def stir(self) -> None:
        """There may be room for those who wait."""
        if len(self._line) or len(self._yielding):
            self._stirred.set()

    def _enter(self, ask: PlanAsk, told: Callable[[], None]) -> Planned | HeldAsk:
        try:
            with self._metrics.decision.time():
                found = self._line_of(ask).enter(ask, told)
        except PenstockError as error:
            self._count_refused(error)
            raise
        self._count_waiting()
        return found

    def _line_of(self, ask: PlanAsk) -> WaitingLine | YieldingLine:
        return self._yielding if ask.yields else self._line

    def _count_waiting(self) -> None:
        self._metrics.held.set(len(self._line))
        self._metrics.held_yielding.set(len(self._yielding))
        self._metrics.yielding.set(self._yielding.live)

    def _outcome(self, held: HeldAsk) -> Planned:
        """What became of a request that was held back. Raises PenstockError."""
        if isinstance(held.outcome, PenstockError):
            self._count_refused(held.outcome)
            raise held.outcome
        assert held.outcome is not None, "it was told"
        return held.outcome

    def _abandon(self, held: HeldAsk) -> None:
        """Nobody waits for it any more."""
        self._line_of(held.ask).leave(held)
        if isinstance(held.outcome, Planned):
            self._release(held.outcome.number)
        self.stir()  # its worker is closed for it no more
        self._count_waiting()

    def _release(self, number: int) -> None:
        if number < 0:
            self._yielding.release(number)
        else:
            self._planner.release(number)
        self.stir()

    def _count_refused(self, error: PenstockError) -> None:
        self._metrics.refused.labels(error.code or type(error).__name__).inc()

    def _count_plan(self, planned: Planned) -> None:
        self._metrics.plans.labels("worker" if planned.prefill else "decode").inc()
        self._metrics.count_planned(planned.decision.sources)
        self._metrics.held_seconds.observe(planned.held_s)

    def _progress(self, number: int, progress: router_pb2.PlanProgress) -> None:
        if number < 0:
            if progress.prefill_done:
                self._yielding.prefilled(number)
        else:
            if progress.prefill_done:
                self._planner.prefilled(number)
            self._planner.generated(number, progress.generated)
        self.stir()

    def _plan_key(self, member: str) -> bytes:
        seat = self._planner.registry.get(member)
        return b"" if seat is None else seat.plan_key

    def _name(self, number: int) -> str:
        """The plan's, among those of all routers."""
        return f"{self._router_id}/{number}"
