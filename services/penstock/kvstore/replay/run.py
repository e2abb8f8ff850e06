"""Replays a trace through the block table: the same leases, reservations, commits and evictions as in a running store.

A request leases the leading blocks that are stored, reserves and commits the others, and leases those too: its blocks
are pinned while it runs. It runs for as long as prefill of what was not stored and its output take by the given
rates; only the order of events depends on them. Commits are at once, so that requests close together share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.kv.policies.cost import PrefillCost
from penstock.kvstore.blocks import Block, State, Wanted, Written
from penstock.kvstore.policy import EvictionPolicy
from penstock.kvstore.replay.traces import ROOT, Ask, Trace
from penstock.kvstore.store import BlockStore

_SESSION = "replay"
_CHECKSUM = b"\1" * 16


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the recorded requests run."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    output_tokens_per_s: float = 50.0


@dataclass(frozen=True, slots=True)
class Saved:
    """What a replay came to."""

    block_hit: float
    """Blocks found, of those asked for."""
    token_hit: float
    seconds_saved: float
    seconds_asked: float
    """Of prefill, without any store."""
    evictions: int
    full: int
    """Blocks that found no room, because all others were pinned."""


class _Nobody:
    """A watcher that doesn't listen."""

    def stored(self, block: Block) -> None: ...

    def removed(self, block: Block) -> None: ...

    def holder(self, slot: int, epoch: int) -> None: ...


class Replay:
    """One trace, one capacity, one policy. `number` and `now` follow the requests; policies may read them."""

    def __init__(self, trace: Trace, rates: Rates) -> None:
        self.trace = trace
        self.rates = rates
        self.number = 0
        self.now = 0.0

    def run(self, capacity: int, policy: Callable[[], EvictionPolicy]) -> Saved:
        """Plays all requests."""
        store = BlockStore(capacity, 1, _Nobody(), policy=policy)
        store.attach(_SESSION, _SESSION)
        found = tokens = full = 0
        seconds = asked = 0.0
        for number, ask in enumerate(self.trace.asks):
            self.number, self.now = number, ask.at
            held, refused = self._ask(store, ask)
            found += held
            full += refused
            hit = self._tokens(held, ask)
            tokens += hit
            seconds += self.rates.prefill.seconds(0, hit)
            asked += self.rates.prefill.seconds(0, ask.tokens)
        blocks = sum(len(ask.keys) for ask in self.trace.asks)
        prompt = sum(ask.tokens for ask in self.trace.asks)
        return Saved(found / blocks, tokens / prompt, seconds, asked, store.stats().evictions, full)

    def _ask(self, store: BlockStore, ask: Ask) -> tuple[int, int]:
        held = store.lookup(ask.keys)
        lasts = self._lasts(held, ask)
        if held:
            store.lease(_SESSION, ask.keys[:held], lasts, self.now, ask.conversation)
        wanted = self._wanted(held, ask)
        if not wanted:
            return held, 0
        answers = store.reserve(_SESSION, wanted, self.now)
        room = next((at for at, answer in enumerate(answers) if answer.state is State.FULL), len(answers))
        written = [
            Written(answer.block.key, answer.block.epoch, _CHECKSUM if at < room else b"")
            for at, answer in enumerate(answers)
            if answer.block is not None
        ]
        store.commit(_SESSION, written, self.now)
        if room:
            store.lease(_SESSION, ask.keys[held : held + room], lasts, self.now, ask.conversation)
        return held, len(answers) - room

    def _wanted(self, held: int, ask: Ask) -> list[Wanted]:
        size = self.trace.block_tokens
        parents = (ROOT, *ask.keys)
        return [
            Wanted(ask.keys[at], parents[at], at * size, 0.0, ask.conversation) for at in range(held, len(ask.keys))
        ]

    def _tokens(self, held: int, ask: Ask) -> int:
        """Of the prompt that need no prefill: whole blocks, and the last token is always computed."""
        size = self.trace.block_tokens
        return min(held, max(0, ask.tokens - 1) // size) * size

    def _lasts(self, held: int, ask: Ask) -> float:
        hit = self._tokens(held, ask)
        prefill = self.rates.prefill
        computing = prefill.seconds(0, ask.tokens) - prefill.seconds(0, hit)
        return max(1e-3, computing + ask.output / self.rates.output_tokens_per_s)
