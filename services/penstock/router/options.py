"""The ways to serve a request, what each costs, and what a decision can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import msgspec

from penstock.router.costs import Prefix, PromptCost, Work, decode_s, delay_s, handed_s, room_s
from penstock.router.demand import Demand, HeldWork
from penstock.router.workers import Role, WorkerFacts


class PromptPlace(NamedTuple):
    """A worker, and what a prompt costs there."""

    worker: WorkerFacts
    cost: PromptCost


class Option(NamedTuple):
    """One way to serve a request, and its seconds by part."""

    prefill: WorkerFacts | None
    """None: the decode worker computes the prompt itself."""
    decode: WorkerFacts
    prompt: PromptCost
    """On whoever computes it."""
    handoff_s: float
    """Until the decode worker has the KV, when another one has computed it."""
    room_s: float
    """What is left then of its wait for room; when it computes the prompt itself, of that wait before the prompt."""
    answer_s: float
    """For the expected answer."""
    work: Work
    total_s: float
    """Until the end of the answer."""
    others_s: float = 0.0
    """What others lose by it."""
    begun: bool = False
    """A part of the answer exists."""

    @property
    def pause_s(self) -> float:
        """Seconds until an answer that had begun goes on; 0 of one that had not."""
        return self.total_s - self.answer_s if self.begun else 0.0

    @property
    def cost_s(self) -> float:
        """Seconds that the request takes, and that others lose by it: what is to be as little as possible. A pause in
        the middle of an answer counts twice: somebody is reading, and how long the rest will take is a guess."""
        return self.total_s + self.others_s + self.pause_s

    @property
    def recent_s(self) -> float:
        """Of prompts that whoever computes this one has had to compute of late."""
        return (self.prefill or self.decode).state.recent_s

    @property
    def first_token_s(self) -> float:
        """Until the prompt is computed."""
        return self.prompt.total_s + (self.room_s if self.prefill is None else 0.0)


def stays(demand: Demand, decode: WorkerFacts, prompt: PromptCost) -> Option:
    """The decode worker computes the prompt itself. Where that is the work of others, it delays the sequences that it
    has."""
    answer_s = decode_s(demand, decode)
    waits_s = max(0.0, room_s(demand, decode) - prompt.queue_s - prompt.ahead_s)
    others_s = delay_s(decode, prompt) if decode.role is Role.DECODE else 0.0
    total_s = prompt.total_s + waits_s + answer_s
    return Option(None, decode, prompt, 0.0, waits_s, answer_s, prompt.work, total_s, others_s, demand.begun)


def moved(demand: Demand, decode: WorkerFacts, place: PromptPlace, answer_s: float) -> Option:
    """Another worker computes the prompt; the answer then takes `answer_s`."""
    computed, fetched = place.cost.work
    work = computed, fetched + demand.prompt_tokens - min(decode.resident_tokens, demand.prompt_tokens)
    handoff_s = handed_s(demand, place.worker, decode)
    moved_s = place.cost.total_s + handoff_s
    waits_s = max(0.0, room_s(demand, decode) - moved_s)
    total_s = moved_s + waits_s + answer_s
    return Option(place.worker, decode, place.cost, handoff_s, waits_s, answer_s, work, total_s, begun=demand.begun)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The workers, and what the request will cost there."""

    chosen: Option
    options: Sequence[Option]
    """All that were looked at, the chosen one among them."""
    choices: int
    """Workers that could have decoded it, looked at or not."""
    beyond_s: float = inf
    """What it would have cost, at least, with those that were not looked at."""

    @property
    def prefill(self) -> WorkerFacts | None:
        """None: the decode worker computes the prompt itself."""
        return self.chosen.prefill

    @property
    def decode(self) -> WorkerFacts:
        """Who generates the answer."""
        return self.chosen.decode

    @property
    def computes(self) -> WorkerFacts:
        """Who computes the prompt."""
        return self.chosen.prefill or self.chosen.decode

    @property
    def prompt(self) -> Prefix:
        """Where its KV will come from, for whoever computes the rest of it."""
        return self.chosen.prompt.known

    @property
    def uncached_tokens(self) -> int:
        """To be charged to whoever computes the prompt."""
        return self.chosen.prompt.uncached_tokens

    @property
    def other_s(self) -> float | None:
        """What the cheapest of the others would have cost, at least, as `Option.cost_s`; None: there is no other."""
        looked_at = (option.cost_s for option in self.options if option is not self.chosen)
        least = min(self.beyond_s, *looked_at, inf)
        return None if least == inf else least

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by where their KV will come from."""
        known = self.prompt
        near = {"worker": known.resident, "store": known.fetched, "awaited": known.awaited, "remote": known.remote}
        return near | {"computed": self.uncached_tokens}

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed for this request alone."""
        return self.prompt.tokens


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker decodes this model."""


@dataclass(frozen=True, slots=True)
class TooLong:
    """No worker could ever hold the request."""

    limit: int
    """Tokens that the roomiest worker can."""


@dataclass(frozen=True, slots=True)
class QueueFull:
    """It would wait too long."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Waits:
    """It would wait at a worker, and is better held back: what is best for it may change until there is room."""

    at: str
    """The worker that has no room."""
    decision: Decision
    """Where it would go now."""
    cost: int
    """Tokens to compute for it, expected output included."""
    holds: HeldWork
    """What it will have that worker do: those behind it come after that."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """No worker gives tokens as soon as is asked for."""

    target: Literal["first_token", "token"]
    best_s: float
    """Predicted for the best of them."""


Answer = Decision | NoWorker | TooLong | QueueFull | Waits | Unmet
