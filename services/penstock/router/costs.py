"""What a request costs on one worker, in predicted seconds: its prompt, the hand-off of its KV, its answer."""

from __future__ import annotations

from typing import NamedTuple

from penstock.router.demand import Demand
from penstock.router.workers import WorkerFacts, WorkerState


class Prefix(NamedTuple):
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


Work = tuple[int, int]
"""Tokens of a prompt to compute, and to fetch, on all workers together."""


class PromptCost(NamedTuple):
    """Seconds until a worker has the KV of a whole prompt, by part. What is fetched comes while others' prompts are
    computed: only what takes longer than that counts."""

    known: Prefix
    uncached_tokens: int
    queue_s: float
    ahead_s: float
    """For those that are held back for the worker, and come before it."""
    compute_s: float
    fetch_s: float
    """From the store of its host."""
    pull_s: float
    """From another host's store."""
    penalty_s: float
    total_s: float
    """All parts."""

    @property
    def work(self) -> Work:
        """What the machines do for it."""
        return self.uncached_tokens, self.known.fetched + self.known.remote


def prompt_cost(demand: Demand, worker: WorkerFacts) -> PromptCost:
    """Seconds until `worker` has the KV of the whole prompt, its queue first."""
    state, known = worker.state, prefix(demand, worker)
    _, fetched, _, remote = known
    uncached = demand.prompt_tokens - sum(known)
    penalty_s, queue_s = worker.penalty_s, state.queue_s
    compute_s = state.prompt.seconds(sum(known), demand.prompt_tokens)
    near_s, pulled_s = fetch_s(state, fetched), pull_s(state, remote)
    if near_s or pulled_s:
        beside_s = min(near_s, queue_s)
        near_s, pulled_s = near_s - beside_s, max(0.0, pulled_s - (queue_s - beside_s))
    ahead_s = demand.ahead(worker.id).prompt_tokens / state.prefill_rate if demand.closed else 0.0
    total_s = queue_s + ahead_s + compute_s + near_s + pulled_s + penalty_s
    return PromptCost(known, uncached, queue_s, ahead_s, compute_s, near_s, pulled_s, penalty_s, total_s)


def prefix(demand: Demand, worker: WorkerFacts) -> Prefix:
    """What the worker need not compute of the prompt: what is in its pages, what it computes for others by then, and
    what its own store and another host's have, each as far as it is there sooner than computed.

    Later blocks take no longer to move than earlier ones, but to compute: so all that a store has is fetched, or none.
    The last token is always computed: its logits are wanted.
    """
    most = demand.prompt_tokens - 1
    resident = min(worker.resident_tokens, most)
    near = max(resident, min(worker.cached_tokens, most))
    soon = min(near + worker.awaited_tokens, most)
    remote = min(worker.cached_tokens + worker.remote_tokens, most) - soon
    known = Prefix(resident, near - resident, soon - near, 0)
    if remote <= 0 and near == resident:
        return known
    ways = [known]
    if remote > 0:
        ways.append(Prefix(resident, near - resident, soon - near, remote))
    if near > resident and soon == near:  # what is awaited lies behind what is fetched for the others
        ways.append(Prefix(resident, 0, 0, 0))
    return min(ways, key=lambda way: _prompt_s(demand, worker.state, way))


def _prompt_s(demand: Demand, worker: WorkerState, known: Prefix) -> float:
    """Seconds until the worker has the KV of the prompt, this much of which it does not compute."""
    moving_s = fetch_s(worker, known.fetched) + pull_s(worker, known.remote)
    return max(worker.queue_s, moving_s) + worker.prompt.seconds(known.tokens, demand.prompt_tokens)


def worth_pulling(worker: WorkerState, first: int, tokens: int) -> bool:
    """Whether the worker has so many tokens from position `first` on sooner from another host's store than by computing
    them."""
    return tokens > 0 and pull_s(worker, tokens) - worker.queue_s < worker.prompt.seconds(first, first + tokens)


def fetch_s(worker: WorkerState, tokens: int) -> float:
    """Seconds until the worker has the KV of so many tokens from the store of its host."""
    return worker.fetch_overhead_s + tokens * worker.fetch_s if tokens else 0.0


def pull_s(worker: WorkerState, tokens: int) -> float:
    """Seconds until the worker has the KV of so many tokens from another host's store."""
    return worker.remote_overhead_s + tokens * worker.remote_fetch_s if tokens else 0.0


class HandedCost(NamedTuple):
    """Seconds from a prompt's first token until a decode worker has its KV, which another worker has computed."""

    beside_s: float
    """When both have the same store, or one has none."""
    apart_s: float

    def from_store(self, prefill: str, decode: str) -> float:
        """When the workers have these stores."""
        return self.apart_s if prefill != decode and prefill and decode else self.beside_s


def handed_cost(demand: Demand, decode: WorkerFacts) -> HandedCost:
    """Whoever computes the prompt."""
    tokens, way, far = demand.prompt_tokens, decode.state.handoff, decode.state.far_handoff
    resident = min(decode.resident_tokens, tokens)
    near = max(resident, min(decode.cached_tokens, tokens))
    apart_s = far.seconds(tokens - near) + (near - resident) * way.token_s
    beside_s = way.seconds(tokens - resident)
    return HandedCost(beside_s, apart_s if near < tokens else beside_s)


def handed_s(demand: Demand, prefill: WorkerFacts, decode: WorkerFacts) -> float:
    """Seconds until `decode` has the KV of the prompt that `prefill` has computed."""
    return handed_cost(demand, decode).from_store(prefill.store, decode.store)


def context_tokens(demand: Demand, worker: WorkerFacts) -> int:
    """Tokens whose KV `worker` holds with the whole request, promised ones too."""
    ahead = demand.ahead(worker.id).context_tokens if demand.closed else 0
    return worker.state.context_tokens + ahead + own_context_tokens(demand, worker)


def own_context_tokens(demand: Demand, worker: WorkerFacts) -> int:
    """Those of them that no other sequence has."""
    return demand.prompt_tokens - min(worker.held_tokens, demand.prompt_tokens) + demand.expected_output


def delay_s(worker: WorkerFacts, prompt: PromptCost) -> float:
    """Seconds that the sequences on `worker` lose, all together, when it computes the prompt beside them."""
    return prompt.compute_s * worker.state.delayed


def step_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds from one token to the next on `worker`, when it decodes the request too."""
    state = worker.state
    sequences = min(state.sequences + 1, state.max_running)
    return state.step.seconds(sequences, min(context_tokens(demand, worker), state.kv_capacity_tokens))


def room_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds until `worker` has room for the KV of the whole request, and a place in its batch.

    The sequences there end one after the other, the last in twice the time that they take in the mean, and each gives
    back as much as the others: so room for a part of what they hold takes that part of it. Who is promised room before
    the request is one of them.
    """
    state, ahead = worker.state, demand.ahead(worker.id)
    sequences, held = state.sequences + ahead.sequences, state.context_tokens + ahead.context_tokens
    short, crowd = context_tokens(demand, worker) - state.kv_capacity_tokens, sequences + 1 - state.max_running
    if not held or (short <= 0 and crowd <= 0):
        return 0.0
    part = min(1.0, max(short / held, crowd / max(1, sequences)))
    step_s = state.step.seconds(min(sequences, state.max_running), min(held, state.kv_capacity_tokens))
    return part * 2 * (state.left_tokens or demand.expected_output / 2) * step_s


def decode_s(demand: Demand, worker: WorkerFacts) -> float:
    """Seconds that the expected answer takes on `worker` once it has the KV and room for it."""
    return demand.expected_output * step_s(demand, worker) + worker.penalty_s
