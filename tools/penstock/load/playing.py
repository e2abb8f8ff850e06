"""Plays sessions open loop: each request is sent when it is due, whatever became of the others, and its time counts
from then on.

What is due when follows from the plan and, for a later turn, from when the turns before it ended. A server that stalls
holds up the sessions that wait for it, as it would hold up agents, and nobody else; requests that are due meanwhile are
sent, and wait. Nothing bounds how many are sent at once but the number of files that a process may have open, and who
waits for one of those is late, which shows as schedule delay.

A turn that fails does not end its session: its answer is replaced by a text of the recorded length, so that the load
is the trace's, however many requests fail.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from penstock.load.asking import Asker, LoadClock, MonotonicClock, fill
from penstock.load.conversation import SessionPrompts
from penstock.load.planning import LoadSession
from penstock.load.records import CANCELLED, LoadRecord
from penstock.load.target import LoadTarget
from penstock.load.tokens import TokenPrompts
from penstock.load.wording import Wording

_AHEAD_S = 0.25
"""So long before it is due, a request is made: its text takes time, which is not the server's."""


class SessionsPlayer:
    """Plays its share of the sessions of a round."""

    def __init__(
        self,
        target: LoadTarget,
        wording: Wording,
        told: Callable[[LoadRecord], None],
        *,
        clock: LoadClock | None = None,
        round: int = 0,
        process: int = 0,
        duration_s: float = 0.0,
        at_once: int = 10_000,
        begun: Callable[[LoadSession], None] = lambda _session: None,
    ) -> None:
        """`told` hears of each request when it is over; what it raises ends the play. Nothing is sent that would be due
        later than `duration_s`; 0: all is. `at_once`: requests at one time, at most. `begun` hears of the first part of
        each answer."""
        self._target = target
        self._wording = wording
        self._told = told
        self.clock = clock or MonotonicClock()
        self._asker = Asker(target, self.clock)
        self._round = round
        self._process = process
        self._duration_s = duration_s
        self._room = asyncio.Semaphore(at_once)
        self._begun = begun

    async def play(self, sessions: tuple[LoadSession, ...], start: float) -> None:
        """Returns when all have ended. `sessions` by the time of their begin, which counts from `start` on."""
        async with asyncio.TaskGroup() as tasks:
            for session in sessions:
                await self.clock.until(start + session.at - _AHEAD_S)
                tasks.create_task(_PlayedSession(self, session, start, tasks).begin())

    def prompts(self, session: LoadSession) -> SessionPrompts | TokenPrompts:
        """Those of one session."""
        if self._target.endpoint != "chat":
            return TokenPrompts(session, self._wording)
        return SessionPrompts(session, self._wording, tools=self._target.tools != "none")

    def too_late(self, due: float) -> bool:
        """Whether a request isn't sent any more that is due so long after the start."""
        return 0 < self._duration_s < due

    async def ask(
        self, session: LoadSession, turn: int, prompts: SessionPrompts | TokenPrompts, times: tuple[float, float]
    ) -> float:
        """Sends a turn when it is due, and tells of it; returns when it ended. `times`: the start, when it is due."""
        start, due = times
        planned = session.turns[turn]
        await self.clock.until(due - _AHEAD_S)
        request = self._request(session, turn, prompts)
        await self.clock.until(due)
        async with self._room:
            record = LoadRecord(
                round=self._round,
                process=self._process,
                session=session.name,
                turn=turn,
                agent=planned.agent,
                number=planned.number,
                scheduled=due - start,
                sent=self.clock.now() - start,
                planned_tokens=planned.tokens,
                planned_output=planned.output,
                reusable=planned.reusable,
            )
            reader = self._asker.reader(lambda: self._begun(session))
            try:
                await self._asker.ask(request, reader, record)
            except asyncio.CancelledError:
                record.error = CANCELLED
                raise
            finally:
                record.ended = self.clock.now() - start
                fill(record, reader, start)
                self._told(record)
        prompts.answered(turn, reader.answer() if record.good else None)
        return start + record.ended

    def _request(self, session: LoadSession, turn: int, prompts: SessionPrompts | TokenPrompts) -> bytes:
        planned = session.turns[turn]
        if isinstance(prompts, TokenPrompts):
            body = self._target.token_body(prompts.ids(turn), planned.output)
        else:
            messages, tools = prompts.messages(turn), prompts.tools(turn)
            body = self._target.chat_body(messages, planned.output, tools, must=planned.calls_tool)
        agent = f".{planned.agent}" if planned.agent else ""
        name = re.sub(r"[^A-Za-z0-9]", "-", f"{self._wording.salt}-{session.name}")
        return self._asker.request(body, f"{name}{agent}")


class _PlayedSession:
    """One session that runs: a turn begins when those that it waits for have ended."""

    def __init__(self, player: SessionsPlayer, session: LoadSession, start: float, tasks: asyncio.TaskGroup) -> None:
        self._player = player
        self._session = session
        self._start = start
        self._tasks = tasks
        self._prompts = player.prompts(session)
        self._waits = [len(turn.after) for turn in session.turns]
        self._ready = [start + session.at] * len(session.turns)
        """When the last of those had ended."""
        self._followers: list[list[int]] = [[] for _ in session.turns]
        for number, turn in enumerate(session.turns):
            for before in turn.after:
                self._followers[before].append(number)

    async def begin(self) -> None:
        """Begins the turns that wait for none."""
        for number, waits in enumerate(self._waits):
            if not waits:
                self._tasks.create_task(self._play(number))

    async def _play(self, number: int) -> None:
        due = self._ready[number] + self._session.turns[number].think_s
        if self._player.too_late(due - self._start):
            return  # and none that waits for it is ever ready
        ended = await self._player.ask(self._session, number, self._prompts, (self._start, due))
        for follower in self._followers[number]:
            self._waits[follower] -= 1
            self._ready[follower] = max(self._ready[follower], ended)
            if not self._waits[follower]:
                self._tasks.create_task(self._play(follower))
