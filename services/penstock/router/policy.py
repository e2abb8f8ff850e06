"""Where a request goes: state in, plan out. No clock, no socket, no await.

Every cost is in predicted seconds, so that a fast worker with a queue and a slow idle one can be compared::

    first token  = (tokens queued + uncached tokens of this prompt) / prefill rate + bytes to fetch / link rates
    whole answer = first token + hand-off + wait for a place in the batch + expected output x predicted step

Uncached tokens count, not the prompt's length, and the queue counts as much as the cache: a rule that follows the
longest prefix alone sends every request with a common system prompt to one worker. Equal costs are decided by chance,
nearly equal ones by where the session was last; nothing else ever depends on the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TypeVar


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
    """Costs within this fraction of the least are equal."""
    home_margin: float = 0.1
    """A session stays where it was when that costs at most this fraction (and 10 ms) more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The workers, and what the request will cost there."""

    prefill: WorkerFacts | None
    """None: the decode worker computes the prompt itself."""
    decode: WorkerFacts
    cached_tokens: int
    """Those from another host's store among them."""
    remote_tokens: int
    uncached_tokens: int
    """To be charged to whoever computes the prompt."""
    first_token_s: float
    total_s: float
    queue_s: float
    choices: int
    """Decode workers that could take the request."""
    other_s: float | None
    """Seconds of the whole answer with the cheapest of the others; None: there is no other."""


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
class _Option:
    prefill: WorkerFacts | None
    decode: WorkerFacts
    first_token_s: float
    total_s: float


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
    chosen = _choose(
        options, lambda option: option.total_s, lambda option: option.decode.id == demand.home_decode, random, knobs
    )
    computes = chosen.prefill or chosen.decode
    wait_s = computes.queued_tokens / computes.prefill_rate
    if wait_s > knobs.max_queue_s:
        return QueueFull(wait_s)
    here, elsewhere = _held(demand, computes)
    return Decision(
        prefill=chosen.prefill,
        decode=chosen.decode,
        cached_tokens=here + elsewhere,
        remote_tokens=elsewhere,
        uncached_tokens=demand.prompt_tokens - here - elsewhere,
        first_token_s=chosen.first_token_s,
        total_s=chosen.total_s,
        queue_s=wait_s,
        choices=len(options),
        other_s=min((option.total_s for option in options if option is not chosen), default=None),
    )


def prompt_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds until `worker` has the KV of the whole prompt, its queue first."""
    here, elsewhere = _held(demand, worker)
    compute = (worker.queued_tokens + demand.prompt_tokens - here - elsewhere) / worker.prefill_rate
    return compute + here * worker.fetch_s + _pull_s(worker, elsewhere) + worker.penalty_s


def decode_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds that the expected answer takes on `worker` once the KV is there: wait for a place, then the steps."""
    sequences = (worker.sequences + 1) / worker.max_running
    context = (worker.context_tokens + demand.prompt_tokens + demand.expected_output) / worker.kv_capacity_tokens
    steps_s = demand.expected_output * worker.step_s * (1 + sequences + context)
    excess = max(0.0, sequences - 1) + max(0.0, context - 1)
    return steps_s * (1 + excess) + worker.penalty_s


def _usable(demand: Demand, workers: list[WorkerFacts]) -> list[WorkerFacts]:
    """Those that have not failed this request; all of them when every one has."""
    return [worker for worker in workers if worker.id not in demand.avoid] or workers


def _limit(worker: WorkerFacts) -> int:
    return min(worker.max_model_len, worker.kv_capacity_tokens)


def _held(demand: Demand, worker: WorkerFacts) -> tuple[int, int]:
    """Tokens from the worker's own store, and from another host's where that is quicker than to compute them.

    The last token is always computed: its logits are wanted.
    """
    here = min(worker.cached_tokens, demand.prompt_tokens - 1)
    elsewhere = min(worker.remote_tokens, demand.prompt_tokens - 1 - here)
    return here, elsewhere if _pull_s(worker, elsewhere) < elsewhere / worker.prefill_rate else 0


def _pull_s(worker: WorkerFacts, tokens: int) -> float:
    """Seconds until the worker has the KV of so many tokens from another host's store."""
    return worker.remote_s + tokens * worker.remote_fetch_s if tokens else 0.0


def _handed_s(demand: Demand, prefill: WorkerFacts, decode: WorkerFacts) -> float:
    """Seconds to fetch the prompt's KV that `prefill` has computed or fetched."""
    if prefill.store == decode.store or not prefill.store or not decode.store:
        return demand.prompt_tokens * decode.fetch_s
    here = min(decode.cached_tokens, demand.prompt_tokens)
    return here * decode.fetch_s + _pull_s(decode, demand.prompt_tokens - here)


def _pick_prefill(demand: Demand, workers: Sequence[WorkerFacts], random: Random, knobs: Knobs) -> WorkerFacts | None:
    able = [
        worker
        for worker in workers
        if worker.role is Role.PREFILL and worker.id not in demand.avoid and _limit(worker) >= demand.prompt_tokens
    ]
    if not able:
        return None
    return _choose(
        able, lambda worker: prompt_s(demand, worker), lambda worker: worker.id == demand.home_prefill, random, knobs
    )


def _option(demand: Demand, decode: WorkerFacts, prefill: WorkerFacts | None, knobs: Knobs) -> _Option:
    here_s = prompt_s(demand, decode)
    local = _Option(None, decode, here_s, here_s + decode_s(demand, decode))
    if prefill is None or decode.role is Role.BOTH:
        return local
    there_s = prompt_s(demand, prefill)
    moved_s = there_s + knobs.handoff_s + _handed_s(demand, prefill, decode)
    short = demand.prompt_tokens - sum(_held(demand, decode)) <= knobs.local_prefill_tokens
    if short and here_s <= moved_s:
        return local
    return _Option(prefill, decode, there_s, moved_s + decode_s(demand, decode))


Choice = TypeVar("Choice")


def _choose(
    choices: Sequence[Choice],
    cost: Callable[[Choice], float],
    is_home: Callable[[Choice], bool],
    random: Random,
    knobs: Knobs,
) -> Choice:
    costs = [cost(choice) for choice in choices]
    least = min(costs)
    for choice, seconds in zip(choices, costs, strict=True):
        if is_home(choice) and seconds <= least * (1 + knobs.home_margin) + 0.01:
            return choice
    near = least * (1 + knobs.tie) + 1e-6
    return random.choice([choice for choice, seconds in zip(choices, costs, strict=True) if seconds <= near])
