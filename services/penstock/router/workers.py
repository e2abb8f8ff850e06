"""What a decision knows of one worker, and what a worker has of one prompt."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec


class Role(Enum):
    """The work of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Decodes, and prefills whatever it decodes."""


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of one decoding step, linear in what it computes."""

    base_s: float
    """However little there is to do."""
    sequence_s: float
    """For each sequence."""
    token_s: float
    """For each token of their context."""

    def times(self, factor: float) -> StepCost:
        """All of it so many times as long."""
        return StepCost(self.base_s * factor, self.sequence_s * factor, self.token_s * factor)

    def seconds(self, sequences: float, context_tokens: float) -> float:
        """Of one step."""
        return self.base_s + sequences * self.sequence_s + context_tokens * self.token_s


class PromptTokenCost(NamedTuple):
    """Seconds of a prompt's token, linear in its position: attention is over all tokens before it."""

    token_s: float
    """However little comes before it."""
    context_s: float
    """For each token before it."""

    def seconds(self, first: int, end: int) -> float:
        """To compute the tokens from position `first` up to `end`."""
        return (end - first) * (self.token_s + self.context_s * (first + end) / 2)


class HandoffCost(NamedTuple):
    """Seconds from a prompt's first token, which another worker has computed, until its KV is here."""

    overhead_s: float
    """However little is missing."""
    token_s: float
    """For each token whose KV is not in pages here."""

    def seconds(self, tokens: int) -> float:
        """Of one that moves the KV of so many tokens."""
        return self.overhead_s + tokens * self.token_s


_NO_HANDOFF = HandoffCost(0.0, 0.0)


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision knows of one worker, whatever the request; this request's charges not included."""

    id: str
    role: Role
    max_model_len: int
    max_running: int
    kv_capacity_tokens: int
    queued_tokens: int
    """Uncached prompt tokens that it will compute before anything new."""
    sequences: int
    context_tokens: int
    """Held, or promised to sequences that run or wait there."""
    prefill_rate: float
    """Tokens per second of prompts as they come, whatever context they have."""
    prompt: PromptTokenCost
    """Of one of which that is known."""
    step: StepCost
    fetch_s: float
    """Seconds to fetch the KV of one token from the store of its host."""
    fetch_overhead_s: float = 0.0
    """Seconds of each such fetch, apart from moving the bytes."""
    remote_fetch_s: float = 0.0
    """As `fetch_s`, by way of another host's store."""
    remote_overhead_s: float = 0.0
    """Seconds of each such fetch, apart from moving the bytes."""
    left_tokens: float = 0.0
    """Of the answers of its sequences, what is expected to come still, in the mean; 0: not known."""
    recent_s: float = 0.0
    """Of prompts that it has had to compute of late."""
    handoff: HandoffCost = _NO_HANDOFF
    """By way of the store of its host."""
    far_handoff: HandoffCost = _NO_HANDOFF
    """By way of another host's."""
    store_away: bool = False
    """It is connected to no store: a hand-off from or to it moves no blocks."""

    @property
    def alone(self) -> bool:
        """Whether no hand-off is of use to it: it computes the prompts that it decodes, and those alone."""
        return self.role is Role.BOTH or self.store_away

    @property
    def most_tokens(self) -> int:
        """Of one sequence, prompt and answer."""
        return min(self.max_model_len, self.kv_capacity_tokens)

    @property
    def queue_s(self) -> float:
        """Until it computes something new."""
        return self.queued_tokens / self.prefill_rate

    @property
    def delayed(self) -> int:
        """Sequences that wait for a prompt which it computes beside them. One is coming soon, if there is none."""
        return max(1, min(self.sequences, self.max_running))

    @property
    def batch_full(self) -> bool:
        """Whether enough sequences are there, so that the next one has come before it can run: a few wait already."""
        return self.sequences >= self.max_running + max(1, self.max_running // 8)


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, and what it has of the prompt of one request, in leading tokens."""

    state: WorkerState
    cached_tokens: int
    """In a store that it reaches."""
    resident_tokens: int = 0
    """In its own pages."""
    awaited_tokens: int = 0
    """How much longer than both is the prefix that it computes for others; part of its queue."""
    held_tokens: int = 0
    """Those that sequences hold which are counted in its `context_tokens`."""
    store: str = ""
    """Workers with the same one share a store; empty: it has none on its host."""
    remote_tokens: int = 0
    """How much longer the prefix in another host's store is, from where its own store could get it."""
    penalty_s: float = 0.0
    """Added to every cost for a while after a fault."""

    @property
    def id(self) -> str:
        """The worker's."""
        return self.state.id

    @property
    def role(self) -> Role:
        """The worker's."""
        return self.state.role
