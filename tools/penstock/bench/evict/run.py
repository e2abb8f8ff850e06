"""Replays a trace through the block table: the same leases, reservations, commits and evictions as in a running store.

A request leases the leading blocks that are stored, reserves and commits the others, and leases those too: its blocks
are pinned while it runs. It runs for as long as prefill of what was not stored and its output take by the given
rates, or until its session asks again; only the order of events depends on that. Commits are at once, so that
requests close together share.

With a second tier, what the first evicts moves to the second, and what is found there is brought up again; the copy
below stays until it is evicted there, so that its next move down is free.

With hints, each session says when a request of it is over whether it has ended or waits; for how long it will
wait it doesn't say: that is learned, by what learns it in a running store.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.kv.cost import PrefillCost
from penstock.kv.hint import ReturnHint
from penstock.kvstore import sessions
from penstock.kvstore.table.blocks import Block, BlockPolicy, ReserveState, Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.traces.reading import ROOT, RecordedAsk, Trace

_SESSION = "replay"
_CHECKSUM = b"\1" * 16
_LEAST_RUN_S = 1e-3

MakePolicy = Callable[[], BlockPolicy]


@dataclass(frozen=True, slots=True)
class ReplayRates:
    """How fast the recorded requests run."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    output_tokens_per_s: float = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The result of a replay."""

    block_hit: float
    """Blocks found, of those asked for."""
    token_hit: float
    seconds_saved: float
    seconds_asked: float
    """Seconds of prefill without any store."""
    below: float
    """Blocks found in the second tier, of those found."""
    evictions: int
    """Evictions from the last tier."""
    moves: int
    """Blocks written to the second tier."""
    full: int
    """Blocks that found no room, because all others were pinned."""


class TraceReplay:
    """One trace under some policy."""

    def __init__(self, trace: Trace, rates: ReplayRates, *, hints: bool = False) -> None:
        self.trace = trace
        self.rates = rates
        self._number = 0
        self._now = 0.0
        self._hints = _Hints() if hints else None
        self._next = _next_asks(trace)
        self._tiers: list[BlockTable] = []
        self._full = 0

    def clock(self) -> float:
        """The time of the request that runs."""
        return self._now

    def at(self) -> int:
        """The number of the request that runs."""
        return self._number

    def run(self, capacities: Sequence[int], policy: MakePolicy) -> Saved:
        """Plays all requests, with one or two tiers of so many blocks. Once."""
        assert not self._tiers, "a replay runs once"
        below = None
        for capacity in reversed(capacities):
            below = _open(capacity, policy, _Below(self, below) if below is not None else _Nobody())
            self._tiers.insert(0, below)
        found = lower = tokens = 0
        seconds = 0.0
        for number, ask in enumerate(self.trace.asks):
            if self._hints is not None:
                self._hint(self._hints.due(ask.at))
            self._number, self._now = number, ask.at
            if self._hints is not None:
                self._hint(self._hints.begins(ask))
            above, brought = self._ask(ask)
            found += above + brought
            lower += brought
            hit = self._tokens(above + brought, ask)
            tokens += hit
            seconds += self.rates.prefill.seconds(0, hit)
        return Saved(
            block_hit=found / sum(len(ask.keys) for ask in self.trace.asks),
            token_hit=tokens / sum(ask.tokens for ask in self.trace.asks),
            seconds_saved=seconds,
            seconds_asked=sum(self.rates.prefill.seconds(0, ask.tokens) for ask in self.trace.asks),
            below=lower / max(1, found),
            evictions=self._tiers[-1].stats().evictions,
            moves=self._tiers[1].stats().puts if len(self._tiers) > 1 else 0,
            full=self._full,
        )

    def _ask(self, ask: RecordedAsk) -> tuple[int, int]:
        """How many blocks were found in the first tier, and how many below."""
        host, keys = self._tiers[0], ask.keys
        stored = [tier.lookup([key]) > 0 for tier in self._tiers for key in keys] if len(self._tiers) > 1 else []
        above = host.lookup(keys)
        held = above
        while held < len(stored) // 2 and (stored[held] or stored[len(keys) + held]):
            held += 1
        brought = sum(not here for here in stored[:held])
        lasts = self._lasts(held, ask)
        if above:
            host.leases.take(_SESSION, keys[:above], lasts, self._now, ask.session)
        if brought:
            low = self._tiers[1]
            for key in keys[above:held]:
                low.leases.take(_SESSION, [key], lasts, self._now, ask.session)
        room = self._put(host, ask, above)
        self._full += len(keys) - above - room
        if room:
            host.leases.take(_SESSION, keys[above : above + room], lasts, self._now, ask.session)
        if self._hints is not None:
            self._hints.ends(ask.session, self._now + lasts, last=self._next[self._number] == math.inf)
        return held - brought, brought

    def _put(self, store: BlockTable, ask: RecordedAsk, first: int) -> int:
        """Stores the blocks from `first` on that there is room for; says how many."""
        size, parents = self.trace.block_tokens, (ROOT, *ask.keys)
        wanted = [Wanted(ask.keys[at], parents[at], at * size, 0.0, ask.session) for at in range(first, len(ask.keys))]
        if not wanted:
            return 0
        answers = store.puts.reserve(_SESSION, wanted, self._now)
        room = next((at for at, answer in enumerate(answers) if answer.state is ReserveState.FULL), len(answers))
        written = [
            Written(answer.block.key, answer.block.epoch, _CHECKSUM if at < room else b"")
            for at, answer in enumerate(answers)
            if answer.block is not None
        ]
        store.puts.commit(_SESSION, written, self._now)
        return room

    def _tokens(self, held: int, ask: RecordedAsk) -> int:
        """Tokens of the prompt that need no prefill: whole blocks, and never the last token."""
        size = self.trace.block_tokens
        return min(held, max(0, ask.tokens - 1) // size) * size

    def _lasts(self, held: int, ask: RecordedAsk) -> float:
        hit = self._tokens(held, ask)
        prefill = self.rates.prefill
        computing = prefill.seconds(0, ask.tokens) - prefill.seconds(0, hit)
        lasts = computing + ask.output / self.rates.output_tokens_per_s
        return max(_LEAST_RUN_S, min(lasts, self._next[self._number] - self._now))

    def _hint(self, outlooks: list[tuple[str, ReturnHint]]) -> None:
        for session, outlook in outlooks:
            for tier in self._tiers:
                tier.expect_session(session, outlook)


class _Hints:
    """Hints of the sessions, and the return hints that the store derives from them."""

    def __init__(self) -> None:
        self._table = sessions.SessionTable(listeners=[self._changed])
        self._outlooks: list[tuple[str, ReturnHint]] = []
        self._pending: list[tuple[float, int, str, sessions.SessionPhase]] = []
        self._count = itertools.count()

    def _changed(self, session: str) -> None:
        known = self._table.known(session)
        assert known is not None
        expected = known.expected_at if known.expected_at < math.inf else None
        self._outlooks.append((session, ReturnHint(known.state is sessions.SessionPhase.ENDED, expected)))

    def _news(self) -> list[tuple[str, ReturnHint]]:
        news, self._outlooks = self._outlooks, []
        return news

    def begins(self, ask: RecordedAsk) -> list[tuple[str, ReturnHint]]:
        """A request of a session begins."""
        self._table.used(ask.session, ask.at)
        return self._news()

    def ends(self, session: str, at: float, *, last: bool) -> None:
        """A request of a session will end at that time."""
        state = sessions.SessionPhase.ENDED if last else sessions.SessionPhase.TOOL
        heapq.heappush(self._pending, (at, next(self._count), session, state))

    def due(self, now: float) -> list[tuple[str, ReturnHint]]:
        """Hints that are due by now."""
        while self._pending and self._pending[0][0] <= now:
            at, _, session, state = heapq.heappop(self._pending)
            self._table.hint(session, state, at)
        return self._news()


def _next_asks(trace: Trace) -> list[float]:
    """Per request, when the next one of its session begins; infinity when none does or the session is unknown."""
    following: dict[str, float] = {}
    found = []
    for ask in reversed(trace.asks):
        found.append(following.get(ask.session, math.inf))
        if ask.session:
            following[ask.session] = ask.at
    return found[::-1]


class _Nobody:
    """A watcher that ignores everything."""

    def block_stored(self, block: Block) -> None: ...

    def block_removed(self, block: Block) -> None: ...

    def slot_held(self, slot: int, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Below(_Nobody):
    """Moves what leaves a tier to the tier below."""

    replay: TraceReplay
    store: BlockTable

    def block_removed(self, block: Block) -> None:
        now = self.replay.clock()
        want = Wanted(block.key, block.parent, block.first_token, block.seconds, block.session)
        [answer] = self.store.puts.reserve(_SESSION, [want], now)
        if answer.block is not None:
            answer.block.uses, answer.block.turn = block.uses, block.turn
            self.store.puts.commit(_SESSION, [Written(block.key, answer.block.epoch, _CHECKSUM)], now)


def _open(capacity: int, policy: MakePolicy, watcher: _Nobody) -> BlockTable:
    store = BlockTable(capacity, 1, watcher, policy=policy)
    store.attach(_SESSION, _SESSION)
    return store
