"""What clients do to a server: agents' sessions, a fan-out, plain requests, long prompts beside streams, recorded
sessions of coding agents.

Each load is a plan of `penstock.load`, played by its client with ids of tokens. Its requests come back under names, so
that figures may speak of some of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.e2e.prompts import first_error
from penstock.load.asking import require_whole
from penstock.load.mixes import MixPart, mixed
from penstock.load.planning import LoadPlan, LoadSession, Playing, planned
from penstock.load.playing import SessionsPlayer
from penstock.load.records import LoadRecord
from penstock.load.target import LoadTarget
from penstock.load.wording import Wording
from penstock.traces.reading import load
from penstock.traces.shaping import shrunk

Parts = Mapping[str, Sequence[LoadRecord]]
"""Requests by what they were part of."""
CODING_AGENTS = Path("loadtest/traces/coding_agents.jsonl.gz")
_HEAD_START_S = 0.1
"""From the begin of a play until its first requests are due: by then they are made."""


@dataclass(frozen=True, slots=True)
class LoadStage:
    """A server, and how prompts for it are made."""

    target: LoadTarget
    vocab: int

    async def play(
        self,
        plan: LoadPlan,
        salt: str,
        begun: Callable[[LoadSession], None] = lambda _session: None,
        head_start_s: float = _HEAD_START_S,
    ) -> list[LoadRecord]:
        """All requests of a plan, which are the same for the same `salt`. Raises AskFailed when one of them isn't
        answered with exactly as many tokens as planned; that ends the others."""
        records: list[LoadRecord] = []

        def told(record: LoadRecord) -> None:
            if not record.cancelled:
                require_whole(record, record.planned_output)
                records.append(record)

        player = SessionsPlayer(self.target, Wording(salt=salt, vocab=self.vocab), told, begun=begun)
        async with first_error():
            await player.play(plan.sessions, player.clock.now() + head_start_s)
        return records


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """Sessions that begin together with the same system prompt, and send everything again in every turn."""

    sessions: int
    turns: int = 6
    system: int = 1200
    """Tokens that all sessions begin with."""
    new: int = 150
    """Further tokens that each turn brings."""
    output: int = 64
    """Tokens generated in each turn."""

    def plan(self) -> LoadPlan:
        """All of it."""
        return _mixed(self.sessions, turns=self.turns, system=self.system, new=self.new, output=self.output)

    async def run(self, stage: LoadStage, salt: str) -> Parts:
        """`turn1` to `turnN`."""
        return by_turn(await stage.play(self.plan(), salt))


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutLoad:
    """An agent that has done one turn starts children at once, each with its whole context and a task of its own."""

    children: int
    system: int = 1200
    new: int = 150
    output: int = 64

    def plan(self) -> LoadPlan:
        """All of it."""
        return _mixed(1, agents=self.children, system=self.system, new=self.new, output=self.output)

    async def run(self, stage: LoadStage, salt: str) -> Parts:
        """`parent` and `children`."""
        found: dict[str, list[LoadRecord]] = {"parent": [], "children": []}
        for record in await stage.play(self.plan(), salt):
            found["children" if record.agent else "parent"].append(record)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLoad:
    """Requests that have nothing in common, all at once."""

    streams: int
    prompt: int = 512
    output: int = 128

    async def run(self, stage: LoadStage, salt: str) -> Parts:
        """`plain`."""
        return {"plain": await stage.play(_mixed(self.streams, new=self.prompt, output=self.output), salt)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoad:
    """Streams run; when all have begun, long prompts come, one after the other, until the streams end."""

    streams: int
    prompt: int = 128
    output: int = 256
    long: int = 2048
    long_output: int = 8

    async def run(self, stage: LoadStage, salt: str) -> Parts:
        """`streams` and `long`."""
        plan = _mixed(self.streams, new=self.prompt, output=self.output)
        waited, all_begun = {session.name for session in plan.sessions}, asyncio.Event()

        def begun(session: LoadSession) -> None:
            waited.discard(session.name)
            if not waited:
                all_begun.set()

        long: list[LoadRecord] = []

        async def prompts_beside(streams: asyncio.Future[list[LoadRecord]]) -> None:
            await all_begun.wait()
            while not streams.done():
                one = _mixed(1, name=f"long{len(long)}", new=self.long, output=self.long_output)
                long.extend(await stage.play(one, salt, head_start_s=0.0))

        async with first_error(), asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(stage.play(plan, salt, begun))
            tasks.create_task(prompts_beside(streams))
        return {"streams": streams.result(), "long": long}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingLoad:
    """Recorded sessions of coding agents, with their think times, shrunk to what a laptop holds."""

    sessions: int
    """The first ones of the recording; those that begin with more than the context are left out."""
    turns: int
    shrink: int = 32
    """Prompts and answers are so many times shorter than recorded."""
    context: int = 4096
    """Tokens of a prompt and its answer; sessions end before a longer one."""
    max_think_s: float = 2.0
    rate: float = 0.5
    """Sessions that begin per second."""

    def plan(self) -> LoadPlan:
        """All of it."""
        playing = Playing(
            limit=self.sessions,
            turns=self.turns,
            context=self.context,
            max_think_s=self.max_think_s,
            rate=self.rate,
            seed="coding",
        )
        return planned(shrunk(load(CODING_AGENTS), self.shrink), playing)

    async def run(self, stage: LoadStage, salt: str) -> Parts:
        """`first` turns of agents, and `later` ones."""
        turns = by_turn(await stage.play(await asyncio.to_thread(self.plan), salt))
        later = [record for name, part in turns.items() if name != "turn1" for record in part]
        return {"first": turns["turn1"], "later": later}


def by_turn(records: Iterable[LoadRecord]) -> dict[str, list[LoadRecord]]:
    """The first, second, nth requests of their agents: `turn1`, ..."""
    found: dict[str, list[LoadRecord]] = {}
    for record in sorted(records, key=lambda record: record.number):
        found.setdefault(f"turn{record.number}", []).append(record)
    return found


def _mixed(sessions: int, **part: int | str) -> LoadPlan:
    """So many sessions of one kind, which begin together."""
    return planned(mixed([MixPart(**part)], sessions, ""), Playing())  # type: ignore[arg-type]
