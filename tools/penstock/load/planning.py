"""From a recorded workload to sessions of turns: what each turn waits for, and what its prompt is made of. Pure.

Agents go on when they have been answered: a turn is due when the turns before it have ended and the think time of the
trace is over. Which turns those are is read off the recording: the agent's own last turn that had ended when this one
was sent; for a sub-agent's first one that of the main agent; and for the main agent the last turns of those sub-agents
that had done their work. So a sub-agent begins where it did, beside its parent, and the parent waits for it where it
did.

A prompt either continues an earlier one of its session, with that one's answer as the server gave it, or it keeps a
part of one, or it is made of blocks: the text of a block follows from its key alone, so prompts that had blocks in
common have them again.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from penstock.traces.reading import RecordedAsk, Trace

_TOKENS_PER_S = 50.0
"""At which a recorded answer is taken to have come, where the trace doesn't say how long it took."""
_ROUNDED_S = 1.0
"""Times of traces are rounded: what ended so much later than the next turn began had ended before."""
_MAIN = 0
"""The agent that the user talks to."""
_MARGIN = 0.05
"""Of a context, is kept free: lengths are those of texts that are made to be about as long."""


class LoadTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a session. Turns are named by their number in it, from 0 on."""

    agent: int
    number: int
    """Among the turns of its agent, from 1 on."""
    after: tuple[int, ...]
    """The turns that have to end first."""
    think_s: float
    """From the end of the last of them until it is due; from the session's begin, where it waits for none."""
    tokens: int
    """Length of its prompt."""
    output: int
    """Tokens to generate."""
    parent: int = -1
    """The turn whose prompt this one begins with; -1: it is made of blocks."""
    kept: int = 0
    """Tokens of that prompt that it has too."""
    answered: bool = False
    """Whether it has the whole of it, and its answer too."""
    system: tuple[str, ...] = ()
    """Seeds of the blocks that it begins with and other sessions too."""
    blocks: tuple[str, ...] = ()
    """Seeds of the blocks after those."""
    new: int = 0
    """Further tokens, which only it has."""
    tools: int = 0
    """Tokens at the beginning of `system` that define tools."""
    calls_tool: bool = False
    """Whether the recorded answer was a call of a tool."""
    reusable: int = 0
    """Tokens that a cache without end would have."""


class LoadSession(msgspec.Struct, frozen=True):
    """Turns that belong together."""

    name: str
    at: float
    """Seconds after the begin of the run at which it begins."""
    block_tokens: int
    turns: tuple[LoadTurn, ...]


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be sent."""

    name: str
    has_sessions: bool
    """Whether the trace says which requests belong together."""
    sessions: tuple[LoadSession, ...]
    """By the time of their begin."""
    cut_sessions: int = 0
    """Sessions that end early, because their next prompt would not fit into the context."""
    skipped_requests: int = 0
    """Requests that are not sent for that reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """How a trace is played."""

    speed: float = 1.0
    """So many times faster: times and think times."""
    rate: float = 0.0
    """Sessions that begin per second, in the mean, instead of at their own times; 0: at those."""
    limit: int = 0
    """Sessions at most; a request without one counts as one; 0: all."""
    turns: int = 0
    """Turns of a session at most; 0: all."""
    max_think_s: float = 0.0
    """Think time at most, as played; 0: any."""
    context: int = 0
    """Tokens that a prompt and its answer may have; 0: any."""
    seed: str = ""
    """Of the times at which sessions begin by a rate."""


def planned(trace: Trace, playing: Playing) -> LoadPlan:
    """The sessions of a trace, as they are to be played."""
    talks = _talks(trace, playing)
    common = _common(talks) if trace.has_sessions else set()
    begins = _begins(talks, playing)
    known: set[bytes] = set()
    room = playing.context - int(playing.context * _MARGIN)
    sessions, cut, skipped = [], 0, 0
    for (name, asks), at in zip(talks, begins, strict=True):
        fitting = [*_fitting(asks, room)] if playing.context else asks
        skipped += len(asks) - len(fitting)
        cut += 0 < len(fitting) < len(asks)
        if fitting:
            turns = _Talk(fitting, trace.block_tokens, common, known).turns()
            known.update(*(ask.keys for ask in fitting))
            sessions.append(LoadSession(name, at, trace.block_tokens, tuple(_played(turns, playing))))
    return LoadPlan(
        name=trace.name,
        has_sessions=trace.has_sessions,
        sessions=tuple(sorted(sessions, key=lambda session: session.at)),
        cut_sessions=cut,
        skipped_requests=skipped,
    )


def _talks(trace: Trace, playing: Playing) -> list[tuple[str, list[RecordedAsk]]]:
    """The sessions in the order of their begin, with their names; requests without one are sessions of their own."""
    talks: dict[str, list[RecordedAsk]] = {}
    for number, ask in enumerate(trace.asks):
        talks.setdefault(ask.session or f"{number}", []).append(ask)
    wanted = [(name, asks[: playing.turns or None]) for name, asks in talks.items()]
    return wanted[: playing.limit or None]


def _begins(talks: Sequence[tuple[str, Sequence[RecordedAsk]]], playing: Playing) -> Iterator[float]:
    source, at = random.Random(playing.seed), 0.0
    for _, asks in talks:
        if playing.rate:
            yield at
            at += source.expovariate(playing.rate)
        else:
            yield asks[0].at / playing.speed


def _common(talks: Iterable[tuple[str, Sequence[RecordedAsk]]]) -> set[bytes]:
    """The blocks that several sessions have."""
    owners: dict[bytes, str] = {}
    common: set[bytes] = set()
    for name, asks in talks:
        for ask in asks:
            for depth in range(len(ask.keys), 0, -1):
                owner = owners.setdefault(ask.keys[depth - 1], name)
                if owner != name:
                    common.update(ask.keys[:depth])
                    break  # a key names all before it
    return common


def _fitting(asks: Sequence[RecordedAsk], room: int) -> Iterator[RecordedAsk]:
    """Those before the first that would not fit."""
    return itertools.takewhile(lambda ask: ask.tokens + ask.output <= room, asks)


class _Talk:
    """The turns of one session, read off its requests."""

    def __init__(self, asks: Sequence[RecordedAsk], block: int, common: set[bytes], known: set[bytes]) -> None:
        """`common`: the blocks that several sessions have; `known`: those of all earlier sessions."""
        self._asks = asks
        self._block = block
        self._common = common
        self._known = known
        self._ends = _ends(asks)
        self._farewells = {number for agent, number in {ask.agent: at for at, ask in enumerate(asks)}.items() if agent}
        """The last turn of each sub-agent that nobody waits for yet."""
        self._owners: dict[bytes, int] = {}
        """The last turn whose whole blocks end with a block, else the first that has it."""

    def turns(self) -> list[LoadTurn]:
        """All of them, in order."""
        turns: list[LoadTurn] = []
        counts: Counter[int] = Counter()
        for at, ask in enumerate(self._asks):
            counts[ask.agent] += 1
            after, think = self._waits(at)
            turn = LoadTurn(
                agent=ask.agent,
                number=counts[ask.agent],
                after=after,
                think_s=think,
                tokens=ask.tokens,
                output=ask.output,
                calls_tool=ask.calls_tool,
            )
            depth = bisect.bisect_left(ask.keys, True, key=lambda key: key not in self._owners)
            parent = self._owners[ask.keys[depth - 1]] if depth else -1
            if parent < 0 or self._is_chance(ask, depth, parent):
                turns.append(self._of_blocks(turn, ask))
            else:
                turns.append(self._continued(turn, ask.at, turns[parent], parent, depth))
            self._owners.update(dict.fromkeys(ask.keys[depth:], at))
            if whole := self._whole(ask):
                self._owners[ask.keys[whole - 1]] = at
        return turns

    def _waits(self, at: int) -> tuple[tuple[int, ...], float]:
        """The turns that this one waits for, and the time since the last of them had ended."""
        ask = self._asks[at]
        last: dict[int, int] = {}
        for number in range(at):
            if self._ended(number, ask.at):
                last[self._asks[number].agent] = number
        own = ask.agent if ask.agent in last else _MAIN
        after = [last[own]] if own in last else []
        if ask.agent == _MAIN:
            done = self._farewells.intersection(last.values())
            after += sorted(done)
            self._farewells -= done
        if not after:
            return (), ask.at - self._asks[0].at
        return tuple(after), max(0.0, ask.at - max(self._ends[number] for number in after))

    def _ended(self, number: int, at: float) -> bool:
        return self._ends[number] <= at + _ROUNDED_S

    def _is_chance(self, ask: RecordedAsk, depth: int, parent: int) -> bool:
        """Whether a prompt has no more in common with another than any two sessions have."""
        return ask.keys[depth - 1] in self._common and depth < self._whole(self._asks[parent])

    def _whole(self, ask: RecordedAsk) -> int:
        """The whole blocks of a prompt."""
        return min(len(ask.keys), ask.tokens // self._block)

    def _continued(self, turn: LoadTurn, sent: float, before: LoadTurn, parent: int, depth: int) -> LoadTurn:
        """A prompt that begins with `depth` blocks of an earlier one: with all of it and its answer, if that had come.
        Where it doesn't wait for that one, it waits for what that one waited for, so that its text is known."""
        whole = depth >= self._whole(self._asks[parent])
        answered = whole and self._ended(parent, sent) and turn.tokens > before.tokens
        kept = before.tokens if whole else depth * self._block
        known = min(kept + (before.output if answered else 0), turn.tokens - 1)
        needed = () if parent in turn.after else (parent,) if answered else before.after
        return msgspec.structs.replace(
            turn,
            after=(*turn.after, *(number for number in needed if number not in turn.after)),
            parent=parent,
            kept=kept,
            answered=answered,
            new=turn.tokens - known,
            reusable=known,
        )

    def _of_blocks(self, turn: LoadTurn, ask: RecordedAsk) -> LoadTurn:
        whole = ask.keys[: self._whole(ask)]
        shared = bisect.bisect_left(whole, True, key=lambda key: key not in self._common)
        depth = bisect.bisect_left(whole, True, key=lambda key: key not in self._known)
        seeds = tuple(key.hex()[:16] for key in whole)
        return msgspec.structs.replace(
            turn,
            system=seeds[:shared],
            blocks=seeds[shared:],
            new=max(ask.tokens - self._block * len(whole), 0 if len(whole) > shared else 1),
            tools=min(ask.tools, shared * self._block),
            reusable=min(depth * self._block, ask.tokens - 1),
        )


def _ends(asks: Sequence[RecordedAsk]) -> list[float]:
    """When each recorded answer had come."""
    following: dict[int, float] = {}
    ends = []
    for ask in reversed(asks):
        took = ask.took or min(ask.output / _TOKENS_PER_S, following.get(ask.agent, math.inf) - ask.at)
        following[ask.agent] = ask.at
        ends.append(ask.at + took)
    return ends[::-1]


def _played(turns: Iterable[LoadTurn], playing: Playing) -> Iterator[LoadTurn]:
    for turn in turns:
        think = turn.think_s / playing.speed
        yield msgspec.structs.replace(turn, think_s=min(think, playing.max_think_s or think))
