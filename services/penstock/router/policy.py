"""Where a request goes: state in, plan out. No clock, no socket, no await.

Every cost is in predicted seconds, so that a fast worker with a queue and a slow idle one can be compared::

    first token  = tokens queued / prefill rate + uncached tokens x (seconds each + context x seconds)
                   + fetches + bytes / link rates
    whole answer = first token + hand-off + what is left of the wait for room + expected output x predicted step

Room for the KV of a whole request, and a place in the batch, come when others end; that is waited for while its prompt
is computed elsewhere, or before it is computed here.

Where computing prompts is the work of others, a decode worker that computes one itself delays the sequences that it
has: what they lose counts too, so it takes what is so short, or would wait so long elsewhere, that it is worth that.
Where either of the two has no store, a hand-off moves nothing, and the decode worker would compute the prompt again: it
computes it alone.

Of an answer that had begun, and lost its worker or its gateway, the wait for the next token counts twice: what has the
KV of it goes before what would decode the rest a little faster.

Uncached tokens count, not the prompt's length, and the queue counts as much as the cache: a rule that follows the
longest prefix alone sends every request with a common system prompt to one worker. What is in a worker's own pages
costs nothing, what it is about to compute for others only the wait in its queue. Nearly equal costs are decided by
where the session was last, else by who has least to compute and to fetch, else by chance; nothing else ever depends on
the session.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from random import Random
from typing import Generic, NamedTuple, TypeVar

from penstock.router.costs import Work, context_tokens, handed_cost, own_context_tokens, prompt_cost, step_s
from penstock.router.demand import Demand, HeldWork, Knobs
from penstock.router.options import (
    Answer,
    Decision,
    NoWorker,
    Option,
    PromptPlace,
    QueueFull,
    TooLong,
    Unmet,
    Waits,
    moved,
    stays,
)
from penstock.router.workers import Role, WorkerFacts


def decide(demand: Demand, workers: Sequence[WorkerFacts], random: Random, knobs: Knobs) -> Answer:
    """The cheapest way to serve `demand`, or why there is none. `workers` all serve its model."""
    found = eligible(demand, workers)
    if not isinstance(found, tuple):
        return found
    roomy, able = ([place(demand, worker) for worker in some] for some in found)
    return choose(demand, roomy, able, random, knobs)


def place(demand: Demand, worker: WorkerFacts) -> PromptPlace:
    """What the prompt costs on a worker."""
    return PromptPlace(worker, prompt_cost(demand, worker))


def eligible(
    demand: Demand, workers: Sequence[WorkerFacts]
) -> tuple[list[WorkerFacts], list[WorkerFacts]] | NoWorker | TooLong:
    """Those that could decode, at least one, and those that could compute the prompt for them; or why there is none."""
    decoders = _usable(demand, [worker for worker in workers if worker.role is not Role.PREFILL])
    if not decoders:
        return NoWorker()
    roomy = [worker for worker in decoders if worker.state.most_tokens > demand.prompt_tokens]
    if not roomy:
        return TooLong(max(worker.state.most_tokens for worker in decoders))
    able = [
        worker
        for worker in workers
        if worker.role is Role.PREFILL
        and not worker.state.alone
        and worker.id not in demand.avoid
        and worker.state.most_tokens >= demand.prompt_tokens
    ]
    return roomy, able


def choose(
    demand: Demand, roomy: Sequence[PromptPlace], able: Sequence[PromptPlace], random: Random, knobs: Knobs
) -> Decision | QueueFull | Waits | Unmet:
    """Who generates the answer, and whether the prompt is computed there too or elsewhere. `roomy` can hold the request
    and decode, at least one; `able` only compute prompts.

    What the hand-off of a pair costs depends on whether both have the same store, or one has none: so for each of
    `roomy` the best of its own store comes into question, the best of those with none, and the best two of the others.
    """
    groups: dict[str, list[PromptPlace]] = {}
    for one in able:
        groups.setdefault(one.worker.store, []).append(one)
    best = {store: _choose_prefill(demand, places, random, knobs) for store, places in groups.items()}
    leading: dict[str, PromptPlace] = {}
    others = [one for store, one in best.items() if store]
    while others and len(leading) < 2:
        leads = _choose_prefill(demand, others, random, knobs)
        leading[leads.worker.store] = leads
        others.remove(leads)
    options = []
    for here in roomy:
        near = {store: best[store] for store in (here.worker.store, "") if store in best}
        options.append(_option(demand, here, (leading | near).values(), knobs))
    good: Sequence[Option] | Unmet = options
    if demand.has_target:
        good = _in_time(demand, options)
    if isinstance(good, Unmet):
        return good
    offers = [_Offer(one, one.cost_s, one.work, one.decode.id == demand.home_decode, one.recent_s) for one in good]
    chosen = _choose(offers, random, knobs)
    if demand.waits and (at := no_room(demand, chosen, knobs)):
        roomy_now = [offer for offer in offers if not no_room(demand, offer.choice, knobs)]
        as_good = [offer for offer in roomy_now if offer.cost_s <= chosen.cost_s * (1 + knobs.tie)]
        if not as_good:
            cost = chosen.prompt.uncached_tokens + demand.expected_output
            decision = Decision(chosen=chosen, options=options, choices=len(options))
            return Waits(at, decision, cost, _holds(demand, chosen, at))
        chosen = _choose(as_good, random, knobs)
    if not demand.waits and chosen.prompt.queue_s > knobs.max_queue_s:
        return QueueFull(chosen.prompt.queue_s)
    return Decision(chosen=chosen, options=options, choices=len(options))


def no_room(demand: Demand, option: Option, knobs: Knobs) -> str | None:
    """The worker of this option that would not begin with the request soon; None: both would. What it computes of this
    prompt for others is as good as begun."""
    decode, computes = option.decode, option.prefill or option.decode
    others_s = option.prompt.queue_s - option.prompt.known.awaited / computes.state.prefill_rate
    if computes.id in demand.closed or others_s > knobs.hold_s:
        return computes.id
    state = decode.state
    full = state.batch_full or (state.sequences > 0 and context_tokens(demand, decode) > state.kv_capacity_tokens)
    return decode.id if full or decode.id in demand.closed else None


def _holds(demand: Demand, option: Option, at: str) -> HeldWork:
    """What one of the workers of an option will do for the request."""
    prompt_tokens = option.prompt.uncached_tokens if at == (option.prefill or option.decode).id else 0
    if at != option.decode.id:
        return HeldWork(prompt_tokens)
    return HeldWork(prompt_tokens, 1, own_context_tokens(demand, option.decode))


def _in_time(demand: Demand, options: Sequence[Option]) -> Sequence[Option] | Unmet:
    """The options whose tokens come as soon as is asked for."""
    soon = [option for option in options if option.first_token_s <= demand.first_token_s]
    if not soon:
        return Unmet("first_token", min(option.first_token_s for option in options))
    steps = [(step_s(demand, option.decode), option) for option in soon]
    good = [option for seconds, option in steps if seconds <= demand.token_s]
    return good or Unmet("token", min(seconds for seconds, _ in steps))


def _choose_prefill(demand: Demand, places: Sequence[PromptPlace], random: Random, knobs: Knobs) -> PromptPlace:
    if len(places) == 1:
        return places[0]
    home = demand.home_prefill
    offers = [
        _Offer(one, one.cost.total_s, one.cost.work, one.worker.id == home, one.worker.state.recent_s) for one in places
    ]
    return _choose(offers, random, knobs)


def _usable(demand: Demand, workers: list[WorkerFacts]) -> list[WorkerFacts]:
    """Those that have not failed this request; all of them when every one has."""
    return [worker for worker in workers if worker.id not in demand.avoid] or workers


def _option(demand: Demand, here: PromptPlace, places: Collection[PromptPlace], knobs: Knobs) -> Option:
    """The best way to an answer of a worker, whose prompt may be computed `here` or at one of `places`."""
    decode = here.worker
    local = stays(demand, decode, here.cost)
    if not places or decode.state.alone:
        return local
    handed = handed_cost(demand, decode)
    seconds = [(one.cost.total_s + handed.from_store(one.worker.store, decode.store), one) for one in places]
    _, computes = min(seconds, key=itemgetter(0))
    best = moved(demand, decode, computes, local.answer_s)
    may = local.prompt.uncached_tokens <= knobs.local_prefill_tokens
    return local if may and local.cost_s <= best.cost_s else best


Choice = TypeVar("Choice")


class _Offer(NamedTuple, Generic[Choice]):
    """Something to choose, and what it costs."""

    choice: Choice
    cost_s: float
    work: Work
    home: bool
    recent_s: float
    """Of prompts that its worker has had to compute of late."""


def nearly_equal(least_s: float, knobs: Knobs) -> float:
    """The highest cost that is nearly equal to the least."""
    return least_s * (1 + knobs.tie) + 1e-6


def _choose(offers: Sequence[_Offer[Choice]], random: Random, knobs: Knobs) -> Choice:
    if len(offers) == 1:
        return offers[0].choice
    least = min(offer.cost_s for offer in offers)
    for offer in offers:
        if offer.home and offer.cost_s <= least * (1 + knobs.home_margin) + 0.01:
            return offer.choice
    near = [offer for offer in offers if offer.cost_s <= nearly_equal(least, knobs)]
    lightest = min((offer.work, offer.recent_s) for offer in near)
    equal = [offer.choice for offer in near if (offer.work, offer.recent_s) == lightest]
    return equal[0] if len(equal) == 1 else random.choice(equal)
