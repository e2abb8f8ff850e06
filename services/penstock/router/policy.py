"""Where a request goes: state in, plan out. No clock, no socket, no await.

Every cost is in predicted seconds, so that a fast worker with a queue and a slow idle one can be compared::

    first token  = (tokens queued + uncached tokens of this prompt) / prefill rate + bytes to fetch / link rates
    whole answer = first token + hand-off + wait for a place in the batch + expected output x predicted step

Uncached tokens count, not the prompt's length, and the queue counts as much as the cache: a rule that follows the
longest prefix alone sends every request with a common system prompt to one worker. What is in a worker's own pages
costs nothing, what it is about to compute for others only the wait in its queue. Nearly equal costs are decided by
where the session was last, else by who has least to compute and to fetch, else by chance; nothing else ever depends on
the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Generic, TypeVar


class Role(Enum):
    """The work of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Decodes, and prefills whatever it decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a decision knows of one worker, this request's charges not included."""

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
    """Tokens per second."""
    step_s: float
    """One decoding step of an empty worker."""
    fetch_s: float
    """Seconds to fetch the KV of one token."""
    cached_tokens: int
    """Longest prefix of this prompt in a store that it reaches."""
    resident_tokens: int = 0
    """Longest prefix in its own pages."""
    awaited_tokens: int = 0
    """How much longer than both is the prefix that it computes for others; part of its queue."""
    held_tokens: int = 0
    """Longest prefix that sequences hold which are counted in `context_tokens`."""
    store: str = ""
    """Workers with the same one share a store; empty: it has none on its host."""
    remote_tokens: int = 0
    """How much longer the prefix in another host's store is, from where its own store could get it."""
    remote_fetch_s: float = 0.0
    """Seconds to fetch the KV of one token by way of that."""
    remote_s: float = 0.0
    """Seconds that such a fetch costs, apart from moving the bytes."""
    penalty_s: float = 0.0
    """Added to every cost for a while after a fault."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One request, as far as placing it is concerned."""

    prompt_tokens: int
    """Tokens whose KV must exist before the next one can be sampled; a moved request's output counts."""
    expected_output: int
    home_prefill: str = ""
    home_decode: str = ""
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings that decisions depend on."""

    local_prefill_tokens: int = 64
    handoff_s: float = 0.01
    max_queue_s: float = 120.0
    tie: float = 0.05
    """Costs within this fraction of the least are nearly equal."""
    home_margin: float = 0.1
    """A session stays where it was when that costs at most this fraction (and 10 ms) more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Leading tokens of a prompt that a worker need not compute for it, in this order."""

    resident: int
    """In its own pages."""
    fetched: int
    """In the store of its host."""
    awaited: int
    """Computed there for others."""
    remote: int
    """In another host's store."""

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.resident + self.fetched + self.awaited + self.remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The workers, and what the request will cost there."""

    prefill: WorkerFacts | None
    """None: the decode worker computes the prompt itself."""
    decode: WorkerFacts
    prompt: Prefix
    """Where its KV will come from, for whoever computes the rest of it."""
    uncached_tokens: int
    """To be charged to whoever computes the prompt."""
    first_token_s: float
    total_s: float
    queue_s: float
    choices: int
    """Decode workers that could take the request."""
    other_s: float | None
    """Seconds of the whole answer with the cheapest of the others; None: there is no other."""

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

    @property
    def remote_tokens(self) -> int:
        """Those of them from another host's store."""
        return self.prompt.remote


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


Work = tuple[int, int]
"""Tokens of a prompt to compute, and to fetch, on all workers together."""


@dataclass(frozen=True, slots=True)
class _Option:
    prefill: WorkerFacts | None
    decode: WorkerFacts
    first_token_s: float
    total_s: float
    work: Work


Answer = Decision | NoWorker | TooLong | QueueFull


def decide(demand: Demand, workers: Sequence[WorkerFacts], random: Random, knobs: Knobs) -> Answer:
    """The cheapest way to serve `demand`, or why there is none. `workers` all serve its model."""
    decoders = _usable(demand, [worker for worker in workers if worker.role is not Role.PREFILL])
    if not decoders:
        return NoWorker()
    need = demand.prompt_tokens + 1
    roomy = [worker for worker in decoders if _limit(worker) >= need]
    if not roomy:
        return TooLong(max(_limit(worker) for worker in decoders))
    prefill = _pick_prefill(demand, workers, random, knobs)
    options = [_option(demand, worker, prefill, knobs) for worker in roomy]
    offers = [_Offer(one, one.total_s, one.work, one.decode.id == demand.home_decode) for one in options]
    chosen = _choose(offers, random, knobs)
    computes = chosen.prefill or chosen.decode
    wait_s = computes.queued_tokens / computes.prefill_rate
    if wait_s > knobs.max_queue_s:
        return QueueFull(wait_s)
    prompt = prefix(demand, computes)
    return Decision(
        prefill=chosen.prefill,
        decode=chosen.decode,
        prompt=prompt,
        uncached_tokens=demand.prompt_tokens - prompt.tokens,
        first_token_s=chosen.first_token_s,
        total_s=chosen.total_s,
        queue_s=wait_s,
        choices=len(options),
        other_s=min((option.total_s for option in options if option is not chosen), default=None),
    )


def prompt_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds until `worker` has the KV of the whole prompt, its queue first."""
    known = prefix(demand, worker)
    compute_s = (worker.queued_tokens + demand.prompt_tokens - known.tokens) / worker.prefill_rate
    return compute_s + known.fetched * worker.fetch_s + _pull_s(worker, known.remote) + worker.penalty_s


def decode_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds that the expected answer takes on `worker` once the KV is there: wait for a place, then the steps."""
    sequences = (worker.sequences + 1) / worker.max_running
    own = demand.prompt_tokens - min(worker.held_tokens, demand.prompt_tokens) + demand.expected_output
    context = (worker.context_tokens + own) / worker.kv_capacity_tokens
    steps_s = demand.expected_output * worker.step_s * (1 + sequences + context)
    excess = max(0.0, sequences - 1) + max(0.0, context - 1)
    return steps_s * (1 + excess) + worker.penalty_s


def _usable(demand: Demand, workers: list[WorkerFacts]) -> list[WorkerFacts]:
    """Those that have not failed this request; all of them when every one has."""
    return [worker for worker in workers if worker.id not in demand.avoid] or workers


def _limit(worker: WorkerFacts) -> int:
    return min(worker.max_model_len, worker.kv_capacity_tokens)


def prefix(demand: Demand, worker: WorkerFacts) -> Prefix:
    """What the worker need not compute of the prompt: what is in its pages and its own store, what it computes for
    others by then, and what another host's store has where that is quicker than to compute it.

    The last token is always computed: its logits are wanted.
    """
    most = demand.prompt_tokens - 1
    resident = min(worker.resident_tokens, most)
    near = max(resident, min(worker.cached_tokens, most))
    soon = min(near + worker.awaited_tokens, most)
    remote = max(0, min(worker.cached_tokens + worker.remote_tokens, most) - soon)
    if not worth_pulling(worker, remote):
        remote = 0
    return Prefix(resident=resident, fetched=near - resident, awaited=soon - near, remote=remote)


def worth_pulling(worker: WorkerFacts, tokens: int) -> bool:
    """Whether the worker has so many tokens sooner from another host's store than by computing them."""
    return tokens > 0 and _pull_s(worker, tokens) < tokens / worker.prefill_rate


def _pull_s(worker: WorkerFacts, tokens: int) -> float:
    """Seconds until the worker has the KV of so many tokens from another host's store."""
    return worker.remote_s + tokens * worker.remote_fetch_s if tokens else 0.0


def _work(demand: Demand, worker: WorkerFacts) -> Work:
    known = prefix(demand, worker)
    return demand.prompt_tokens - known.tokens, known.fetched + known.remote


def _handed_s(demand: Demand, prefill: WorkerFacts, decode: WorkerFacts) -> float:
    """Seconds to fetch the prompt's KV that `prefill` has computed or fetched, as far as `decode` lacks it."""
    resident = min(decode.resident_tokens, demand.prompt_tokens)
    near = demand.prompt_tokens
    if prefill.store != decode.store and prefill.store and decode.store:
        near = max(resident, min(decode.cached_tokens, demand.prompt_tokens))
    return (near - resident) * decode.fetch_s + _pull_s(decode, demand.prompt_tokens - near)


def _pick_prefill(demand: Demand, workers: Sequence[WorkerFacts], random: Random, knobs: Knobs) -> WorkerFacts | None:
    able = [
        worker
        for worker in workers
        if worker.role is Role.PREFILL and worker.id not in demand.avoid and _limit(worker) >= demand.prompt_tokens
    ]
    if not able:
        return None
    offers = [
        _Offer(worker, prompt_s(demand, worker), _work(demand, worker), worker.id == demand.home_prefill)
        for worker in able
    ]
    return _choose(offers, random, knobs)


def _option(demand: Demand, decode: WorkerFacts, prefill: WorkerFacts | None, knobs: Knobs) -> _Option:
    here_s, answer_s = prompt_s(demand, decode), decode_s(demand, decode)
    local = _Option(None, decode, here_s, here_s + answer_s, _work(demand, decode))
    if prefill is None or decode.role is Role.BOTH:
        return local
    there_s = prompt_s(demand, prefill)
    moved_s = there_s + knobs.handoff_s + _handed_s(demand, prefill, decode)
    short = demand.prompt_tokens - prefix(demand, decode).tokens <= knobs.local_prefill_tokens
    if short and here_s <= moved_s:
        return local
    computed, fetched = _work(demand, prefill)
    work = computed, fetched + demand.prompt_tokens - min(decode.resident_tokens, demand.prompt_tokens)
    return _Option(prefill, decode, there_s, moved_s + answer_s, work)


Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class _Offer(Generic[Choice]):
    """Something to choose, and what it costs."""

    choice: Choice
    cost_s: float
    work: Work
    home: bool


def _choose(offers: Sequence[_Offer[Choice]], random: Random, knobs: Knobs) -> Choice:
    least = min(offer.cost_s for offer in offers)
    for offer in offers:
        if offer.home and offer.cost_s <= least * (1 + knobs.home_margin) + 0.01:
            return offer.choice
    near = [offer for offer in offers if offer.cost_s <= least * (1 + knobs.tie) + 1e-6]
    lightest = min(offer.work for offer in near)
    return random.choice([offer.choice for offer in near if offer.work == lightest])
