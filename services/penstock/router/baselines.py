"""Simple and well-known ways to choose a worker, selectable, and beside which the router's own policy is measured.

Each is a pure function of what the policy knows too. They look at every worker, and choose the worker that decodes and,
where there are some, the one that computes the prompt, each by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal

from penstock.router.costs import prompt_cost
from penstock.router.demand import Demand, Knobs
from penstock.router.options import Answer, Decision, PromptPlace, QueueFull, moved, stays
from penstock.router.policy import eligible
from penstock.router.workers import Role, WorkerFacts

PolicyName = Literal[
    "seconds",
    "round-robin",
    "random",
    "least-tokens",
    "two-choices",
    "prefix-hash",
    "longest-prefix",
    "cache-aware",
    "dynamo",
    "llm-d",
]
"""`seconds` is the router's own."""

_SHORT_TOKENS = 64
"""Uncached tokens of a prompt for which a hand-off is never worth it."""
Pick = Callable[[Demand, Sequence[WorkerFacts], Random], WorkerFacts]
"""One of at least one worker."""


def _random(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    return random.choice(workers)


def _outstanding(worker: WorkerFacts) -> int:
    return worker.state.queued_tokens + worker.state.context_tokens


def _least(workers: Sequence[WorkerFacts], cost: Callable[[WorkerFacts], float], random: Random) -> WorkerFacts:
    least = min(map(cost, workers))
    return random.choice([worker for worker in workers if cost(worker) == least])


def _least_tokens(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    return _least(workers, _outstanding, random)


def _two_choices(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    """The less loaded of two (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001)."""
    return _least(random.sample(workers, min(2, len(workers))), _outstanding, random)


def _prefix_hash(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    """By the prompt's first blocks, with rendezvous hashing (Thaler, Ravishankar, 1998): a worker that comes or goes
    moves its own part only."""
    if not demand.opening:
        return _least_tokens(demand, workers, random)
    return max(workers, key=lambda worker: hashlib.sha256(demand.opening + worker.id.encode()).digest())


def _matched(demand: Demand, worker: WorkerFacts) -> int:
    return min(max(worker.resident_tokens, worker.cached_tokens), demand.prompt_tokens)


def _longest_prefix(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    return _least(workers, lambda worker: -_matched(demand, worker), random)


def _cache_aware(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    """As SGLang's gateway documents it: the longest prefix, unless it is short or the workers are unequally loaded."""
    loads = [worker.state.sequences for worker in workers]
    best = _longest_prefix(demand, workers, random)
    unequal = max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)
    if unequal or _matched(demand, best) <= 0.3 * demand.prompt_tokens:
        return _least(workers, lambda worker: worker.state.sequences, random)
    return best


def _dynamo(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    """NVIDIA Dynamo's documented cost, in tokens: prefill load less credit for what is cached, plus decode load."""

    def cost(worker: WorkerFacts) -> float:
        resident = min(worker.resident_tokens, demand.prompt_tokens)
        credit = resident + 0.75 * (_matched(demand, worker) - resident)
        prefill = max(0.0, worker.state.queued_tokens + demand.prompt_tokens - credit)
        return prefill + worker.state.context_tokens + demand.prompt_tokens

    return _least(workers, cost, random)


def _llm_d(demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
    """A weighted sum of llm-d's documented scorers: prefix, queue and memory in use."""
    queues = [worker.state.queued_tokens for worker in workers]
    most, span = max(queues), max(queues) - min(queues)

    def score(worker: WorkerFacts) -> float:
        state = worker.state
        prefix = _matched(demand, worker) / demand.prompt_tokens
        queue = (most - state.queued_tokens) / span if span else 1.0
        room = 1 - min(1.0, state.context_tokens / state.kv_capacity_tokens)
        return 3 * prefix + 2 * queue + 2 * room

    return _least(workers, lambda worker: -score(worker), random)


class _RoundRobin:
    """Each in turn, by id; the only one that remembers anything."""

    def __init__(self) -> None:
        self._last: dict[Role, str] = {}

    def __call__(self, demand: Demand, workers: Sequence[WorkerFacts], random: Random) -> WorkerFacts:
        ordered = sorted(workers, key=lambda worker: worker.id)
        last = self._last.get(ordered[0].role, "")
        chosen = next((worker for worker in ordered if worker.id > last), ordered[0])
        self._last[ordered[0].role] = chosen.id
        return chosen


_PICKS: Mapping[PolicyName, Pick] = {
    "random": _random,
    "least-tokens": _least_tokens,
    "two-choices": _two_choices,
    "prefix-hash": _prefix_hash,
    "longest-prefix": _longest_prefix,
    "cache-aware": _cache_aware,
    "dynamo": _dynamo,
    "llm-d": _llm_d,
}


class Baseline:
    """One of these policies at work."""

    def __init__(self, name: PolicyName) -> None:
        self._pick = _RoundRobin() if name == "round-robin" else _PICKS[name]

    def decide(self, demand: Demand, workers: Sequence[WorkerFacts], random: Random, knobs: Knobs) -> Answer:
        """Its choice, or why there is none: the same reasons as those of the router's own policy."""
        found = eligible(demand, workers)
        if not isinstance(found, tuple):
            return found
        roomy, able = found
        decode = self._pick(demand, roomy, random)
        here = prompt_cost(demand, decode)
        option = stays(demand, decode, here)
        if able and not decode.state.alone and here.uncached_tokens > _SHORT_TOKENS:
            prefill = self._pick(demand, able, random)
            place = PromptPlace(prefill, prompt_cost(demand, prefill))
            option = moved(demand, decode, place, option.answer_s)
        if option.prompt.queue_s > knobs.max_queue_s:
            return QueueFull(option.prompt.queue_s)
        return Decision(chosen=option, options=[option], choices=len(roomy))
