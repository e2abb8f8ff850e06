"""The policy alone: plain data in, a decision out."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.router.costs import decode_s, prompt_cost, room_s, step_s
from penstock.router.demand import Demand, HeldWork, Knobs
from penstock.router.options import Answer, Decision, NoWorker, QueueFull, TooLong, Unmet, Waits
from penstock.router.policy import decide
from penstock.router.workers import HandoffCost, PromptTokenCost, Role, StepCost, WorkerFacts, WorkerState


def worker(id: str, role: Role = Role.BOTH, **other: Any) -> WorkerFacts:
    fields: dict[str, Any] = {
        "max_model_len": 32_768,
        "max_running": 32,
        "kv_capacity_tokens": 200_000,
        "queued_tokens": 0,
        "sequences": 0,
        "context_tokens": 0,
        "prefill_rate": 5000.0,
        "prompt": PromptTokenCost(1 / 5000, 0.0),
        "step": step(0.02),
        "fetch_s": 1e-6,
        "handoff": HandoffCost(0.01, 1e-6),
        "far_handoff": HandoffCost(0.02, 1e-6),
    }
    return but(WorkerFacts(state=WorkerState(id=id, role=role, **fields), cached_tokens=0), **other)


def step(base_s: float) -> StepCost:
    """A full batch takes twice what an empty worker takes, and full memory once more."""
    return StepCost(base_s, base_s / 32, base_s / 200_000)


def but(worker: WorkerFacts, **changes: Any) -> WorkerFacts:
    """The worker with other values of its own or of its state; with another rate prompts take as long as it says."""
    if "prefill_rate" in changes:
        changes.setdefault("prompt", PromptTokenCost(1 / changes["prefill_rate"], 0.0))
    state = {name: changes.pop(name) for name in list(changes) if name in WorkerState.__slots__}
    return replace(worker, state=replace(worker.state, **state), **changes)


def pick(workers: list[WorkerFacts], ask: Demand | None = None, seed: int = 1, **knobs: Any) -> Answer:
    return decide(ask or Demand(2000, 100), workers, Random(seed), Knobs(**knobs))


def decision(workers: list[WorkerFacts], ask: Demand | None = None, seed: int = 1, **knobs: Any) -> Decision:
    answer = pick(workers, ask, seed, **knobs)
    assert isinstance(answer, Decision), answer
    return answer


def seconds(ask: Demand, worker: WorkerFacts) -> float:
    return prompt_cost(ask, worker).total_s


def names(workers: list[WorkerFacts], ask: Demand | None = None, **knobs: Any) -> Counter[str]:
    return Counter(decision(workers, ask, seed, **knobs).decode.id for seed in range(200))


PREFILL, DECODE = worker("p", Role.PREFILL), worker("d", Role.DECODE)


def test_prefill_and_decode_are_placed_apart() -> None:
    made = decision([PREFILL, DECODE])
    assert (made.prefill, made.decode) == (PREFILL, DECODE)
    assert made.chosen.first_token_s == pytest.approx(2000 / 5000)


def test_decode_prefills_when_nobody_else_does() -> None:
    assert decision([DECODE]).prefill is None


def test_a_worker_of_both_roles_prefills_what_it_decodes() -> None:
    slow = but(DECODE, step=step(1.0))
    made = decision([PREFILL, slow, worker("b")])
    assert (made.prefill, made.decode.id) == (None, "b")


def test_a_queue_weighs_as_much_as_a_cached_prefix() -> None:
    busy = worker("busy", cached_tokens=1900, queued_tokens=3000)
    assert decision([busy, worker("idle")]).decode.id == "idle"
    assert decision([but(busy, queued_tokens=500), worker("idle")]).decode.id == "busy"


def test_seconds_make_unequal_workers_comparable() -> None:
    fast_with_queue = worker("fast", queued_tokens=8000, prefill_rate=20_000)
    assert decision([fast_with_queue, worker("slow", prefill_rate=2000)]).decode.id == "fast"


def test_a_slow_link_makes_the_cache_worthless() -> None:
    far = worker("far", cached_tokens=1900, fetch_s=1e-3)
    assert names([far, worker("near")]).keys() == {"far", "near"}, "who has it would compute it too"


def test_another_hosts_store_is_used_where_that_is_quicker_than_to_compute() -> None:
    far = worker("a", cached_tokens=200, remote_tokens=1500, remote_fetch_s=1e-5, remote_overhead_s=0.01)
    made = decision([far])
    assert (made.cached_tokens, made.prompt.remote, made.uncached_tokens) == (1700, 1500, 300)
    assert seconds(Demand(2000, 10), far) == pytest.approx(300 / 5000 + 200e-6 + 0.01 + 1500e-5)
    slow = decision([but(far, remote_fetch_s=1 / 4999)])
    assert (slow.cached_tokens, slow.prompt.remote, slow.uncached_tokens) == (200, 0, 1800)
    few = decision([but(far, remote_tokens=40)])
    assert (few.cached_tokens, few.prompt.remote) == (200, 0), "a pull has a price of its own"


def test_what_is_stored_is_computed_where_that_is_quicker() -> None:
    """At a slow way, or one that takes long however little there is; behind a long context even then."""
    near = worker("a", cached_tokens=1500)
    assert decision([near]).sources["store"] == 1500
    for slow in ({"fetch_s": 1 / 4999}, {"fetch_overhead_s": 0.31}):
        made = decision([but(near, **slow)])
        assert (made.sources["store"], made.uncached_tokens) == (0, 2000)
        here = decision([but(near, **slow, resident_tokens=1000, cached_tokens=1016)])
        assert (here.sources["worker"], here.sources["store"], here.uncached_tokens) == (1000, 0, 1000)
        deep = but(near, **slow, prompt=PromptTokenCost(1 / 5000, 1e-8), cached_tokens=30_000)
        deep = but(deep, kv_capacity_tokens=10**6, max_model_len=10**6)
        assert decision([deep], Demand(32_000, 10)).sources["store"] == 30_000


def test_what_is_fetched_comes_while_others_are_computed() -> None:
    slow = worker("a", cached_tokens=1500, fetch_s=1e-3)
    ask = Demand(2000, 10)
    assert decision([slow], ask).sources["store"] == 0, "to compute it takes 0.3 s, to fetch it 1.5 s"
    for queued, left_s in ((6100, 1.5 - 1.22), (10_000, 0.0)):
        cost = prompt_cost(ask, but(slow, queued_tokens=queued))
        assert (cost.known.fetched, cost.fetch_s) == (1500, pytest.approx(left_s))
        assert cost.total_s == pytest.approx(max(queued / 5000, 1.5) + 500 / 5000)
    assert prompt_cost(ask, but(slow, queued_tokens=5900)).known.fetched == 0


@given(
    tokens=st.integers(1, 400),
    held=st.tuples(*[st.integers(0, 500)] * 4),
    rates=st.tuples(*[st.floats(1e-4, 1e-1)] * 3),
    each=st.tuples(*[st.floats(0, 5)] * 2),
    queued=st.integers(0, 300),
)
def test_of_all_ways_to_a_prompts_kv_the_quickest_is_taken(
    tokens: int, held: tuple[int, ...], rates: tuple[float, ...], each: tuple[float, ...], queued: int
) -> None:
    """Beside all places at which one could stop to fetch and begin to compute; while others are computed beside those
    where a holder ends."""
    resident, cached, awaited, remote = held
    compute_s, fetch_s, pull_s = rates
    state = {"prefill_rate": 1 / compute_s, "queued_tokens": queued, "prompt": PromptTokenCost(compute_s, 1e-5)}
    way = {"fetch_s": fetch_s, "fetch_overhead_s": each[0], "remote_fetch_s": pull_s, "remote_overhead_s": each[1]}
    here = worker("a", **state, **way, resident_tokens=resident, cached_tokens=cached, awaited_tokens=awaited)
    here = but(here, remote_tokens=remote)
    most = tokens - 1
    own = min(resident, most)
    near = max(own, min(cached, most))
    soon = min(near + awaited, most)
    far = max(soon, min(cached + remote, most))
    found = []
    for end in range(far + 1) if not queued else (own, soon, far):
        fetched, pulled = max(0, min(end, near) - own), max(0, end - soon)
        if end < own or (soon > near and end < soon):
            continue  # what it has, and what it computes for others, it does not compute again
        moving_s = (each[0] + fetched * fetch_s) * (fetched > 0) + (each[1] + pulled * pull_s) * (pulled > 0)
        rest_s = sum(compute_s + 1e-5 * (at + 0.5) for at in range(end, tokens))
        found.append(max(queued * compute_s, moving_s) + rest_s)
    assert seconds(Demand(tokens, 1), here) == pytest.approx(min(found))


def test_nearer_is_better_when_the_queues_are_equal() -> None:
    far = worker("far", remote_tokens=1900, remote_fetch_s=1e-5, remote_overhead_s=0.01)
    near = worker("near", cached_tokens=1900)
    short = Demand(2000, 1)
    assert names([far, near], short) == {"near": 200}
    assert names([far, but(near, queued_tokens=1000)], short) == {"far": 200}


def test_a_hand_off_to_another_host_counts_its_bytes_at_that_links_rate() -> None:
    prefill = but(PREFILL, store="one")
    here, there = but(DECODE, id="here", store="one"), but(DECODE, id="there", store="two")
    decoders = [but(one, far_handoff=HandoffCost(0.01, 1e-4)) for one in (here, there)]
    assert names([prefill, *decoders]) == {"here": 200}
    even = [but(one, far_handoff=HandoffCost(0.01, 1e-6)) for one in decoders]
    assert names([prefill, *even]).keys() == {"here", "there"}


def test_a_quick_way_to_another_hosts_store_finds_its_worker() -> None:
    """Quicker than to the own store: the best of another host is better than one beside it, and than one with none."""
    decode = but(DECODE, store="one", handoff=HandoffCost(0.0, 1e-3), far_handoff=HandoffCost(0.0, 1e-6))
    alone, beside = but(PREFILL, id="alone"), but(PREFILL, id="beside", store="one", queued_tokens=100)
    far = but(PREFILL, id="far", store="two", queued_tokens=200)
    made = decision([alone, beside, far, decode])
    assert made.prefill is not None and made.prefill.id == "far"


def test_the_last_token_is_always_computed() -> None:
    made = decision([worker("a", cached_tokens=4096)], Demand(2000, 10))
    assert (made.cached_tokens, made.uncached_tokens) == (1999, 1)


def test_a_short_tail_stays_with_decode() -> None:
    cached = [but(worker, cached_tokens=1950) for worker in (PREFILL, DECODE)]
    assert decision(cached).prefill is None
    assert decision(cached, local_prefill_tokens=0).prefill is not None
    assert decision([but(w, cached_tokens=1900) for w in cached]).prefill is not None


def test_a_short_tail_does_not_wait_behind_another_prompt() -> None:
    cached = [but(worker, cached_tokens=1950) for worker in (PREFILL, DECODE)]
    assert decision([cached[0], but(cached[1], queued_tokens=4000)]).prefill is not None


def test_decode_computes_what_costs_less_than_a_hand_off() -> None:
    """As it was learned; what its sequences lose meanwhile counts too."""
    cached = [but(worker, cached_tokens=1950) for worker in (PREFILL, DECODE)]
    assert decision([cached[0], but(cached[1], handoff=HandoffCost(0.001, 1e-6))]).prefill is not None
    assert decision([cached[0], but(cached[1], sequences=3)]).prefill is not None
    slow = but(DECODE, handoff=HandoffCost(0.5, 1e-6))
    assert decision([PREFILL, slow]).prefill is None
    assert decision([PREFILL, but(slow, sequences=3)]).prefill is not None


def test_decode_computes_what_would_wait_longer_elsewhere() -> None:
    """As long as that is worth more than what its sequences lose."""
    behind = but(PREFILL, queued_tokens=5000)
    made = decision([behind, DECODE])
    assert (made.prefill, made.chosen.others_s) == (None, pytest.approx(0.4))
    assert made.chosen.total_s == pytest.approx(0.4 + decode_s(Demand(2000, 100), DECODE))
    assert decision([behind, but(DECODE, sequences=2)]).prefill is None
    assert decision([behind, but(DECODE, sequences=3)]).prefill is behind
    assert decision([behind, DECODE], local_prefill_tokens=1999).prefill is behind


def test_without_a_store_there_is_no_hand_off() -> None:
    """It would move nothing: the decode worker computes the prompt once, whatever else is said of that."""
    lost, alone = but(PREFILL, store_away=True), but(DECODE, id="alone", store_away=True)
    for pair in ([lost, DECODE], [PREFILL, alone]):
        made = decision(pair, local_prefill_tokens=0)
        assert (made.prefill, made.decode) == (None, pair[1])
    other = but(PREFILL, id="q", queued_tokens=9000)
    assert decision([lost, other, DECODE], local_prefill_tokens=0).prefill is other
    assert names([PREFILL, alone, DECODE]) == {"d": 200}
    assert names([PREFILL, alone, but(DECODE, step=step(1.0))]) == {"alone": 200}


@given(first=st.integers(0, 200), count=st.integers(0, 200), token_s=st.floats(0, 1), context_s=st.floats(0, 1))
def test_a_prompt_costs_what_its_tokens_do(first: int, count: int, token_s: float, context_s: float) -> None:
    """The naive sum: each attends to all before it, and to half of itself."""
    each = [token_s + context_s * (position + 0.5) for position in range(first, first + count)]
    assert PromptTokenCost(token_s, context_s).seconds(first, first + count) == pytest.approx(sum(each))


def test_the_end_of_a_long_prompt_costs_more_than_its_beginning() -> None:
    """So who has the beginning computes less of it, but not so much less as its tokens say."""
    attends = {"prompt": PromptTokenCost(1 / 5000, 1e-8)}
    ask = Demand(100_000, 10)
    other = worker("a", cached_tokens=90_000, kv_capacity_tokens=10**6, max_model_len=10**6)
    here = but(other, **attends)
    cost = prompt_cost(ask, here)
    assert cost.compute_s == pytest.approx(10_000 / 5000 + 10_000 * 95_000 * 1e-8)
    empty = but(here, id="b", cached_tokens=0)
    assert prompt_cost(ask, empty).compute_s == pytest.approx(100_000 / 5000 + 100_000**2 / 2 * 1e-8)
    busy = but(here, queued_tokens=95_000)
    assert decision([busy, empty], ask).decode.id == "a", "the beginning takes 58.5 s, the queue 19 s"
    plain = but(other, queued_tokens=98_000)
    assert decision([plain, but(other, id="b", cached_tokens=0)], ask).decode.id == "b", "18 s, and the queue 19.6 s"


def test_what_lies_deep_is_pulled_sooner() -> None:
    """Behind a long context to compute takes longer, so a slow way is worth it there."""
    far = worker("a", remote_tokens=1500, remote_fetch_s=3e-4, prompt=PromptTokenCost(1 / 5000, 1e-8))
    assert decision([far]).prompt.remote == 0
    deep = but(far, cached_tokens=30_000, kv_capacity_tokens=10**6, max_model_len=10**6)
    assert decision([deep], Demand(32_000, 10)).prompt.remote == 1500


def test_equals_are_chosen_by_chance() -> None:
    found = names([worker(name) for name in "abcd"])
    assert set(found) == set("abcd")
    assert max(found.values()) < 100


def test_the_same_seed_decides_the_same() -> None:
    workers = [worker(name) for name in "abcdefgh"]
    assert len({decision(workers, seed=7).decode.id for _ in range(20)}) == 1


def test_home_decides_between_near_equals_only() -> None:
    home = Demand(2000, 100, home_decode="b")
    workers = [worker("a"), worker("b", queued_tokens=200)]
    assert names(workers, home) == {"b": 200}
    workers = [worker("a"), worker("b", queued_tokens=5000)]
    assert names(workers, home) == {"a": 200}


def test_of_near_equals_the_one_with_least_work_is_chosen() -> None:
    """Who computes less, then who fetches less; never at the price of an answer that is later by more than a little."""
    short = [worker("a", queued_tokens=100, awaited_tokens=100), worker("b", awaited_tokens=16), worker("c")]
    assert names(short) == {"a": 200}
    stored = [worker("a", cached_tokens=1600), worker("b", cached_tokens=1600, resident_tokens=800)]
    assert names(stored) == {"b": 200}
    assert names([*stored, worker("c", queued_tokens=9000, resident_tokens=1600)]) == {"b": 200}
    assert names(stored, Demand(2000, 100, home_decode="a")) == {"a": 200}


def test_pages_cost_nothing_and_what_is_awaited_only_its_queue() -> None:
    ask = Demand(2000, 10)
    near = worker("a", cached_tokens=1000, resident_tokens=600, awaited_tokens=500, fetch_s=1e-4)
    assert seconds(ask, near) == pytest.approx(400 * 1e-4 + 500 / 5000)
    assert seconds(ask, but(near, queued_tokens=700)) == pytest.approx(1200 / 5000)
    made = decision([but(near, remote_tokens=900, remote_fetch_s=1e-6)], ask)
    assert made.sources == {"worker": 600, "store": 400, "awaited": 500, "remote": 400, "computed": 100}
    deep = decision([but(near, resident_tokens=1800)], ask)
    assert deep.sources == {"worker": 1800, "store": 0, "awaited": 199, "remote": 0, "computed": 1}


def test_an_answer_that_had_begun_goes_on_where_its_kv_is() -> None:
    """A second until its next token counts as much as two of what comes after it."""
    ask = Demand(10_000, 100)
    slower = worker("slower", resident_tokens=10_000, step=step(0.05))
    assert names([slower, worker("quicker")], ask) == {"quicker": 200}
    begun = replace(ask, begun=True)
    assert names([slower, worker("quicker")], begun) == {"slower": 200}
    assert names([but(slower, step=step(0.08)), worker("quicker")], begun) == {"quicker": 200}
    elsewhere = decision([worker("p", Role.PREFILL, resident_tokens=10_000), DECODE], begun).chosen
    assert elsewhere.pause_s == pytest.approx(elsewhere.first_token_s + elsewhere.handoff_s)
    assert elsewhere.cost_s == pytest.approx(elsewhere.total_s + elsewhere.pause_s)


def test_a_hand_off_moves_what_is_not_in_pages() -> None:
    decoders = [but(DECODE, id=name, handoff=HandoffCost(0.01, 1e-3)) for name in "xyz"]
    decoders[1] = but(decoders[1], resident_tokens=1500)
    assert names([PREFILL, *decoders]) == {"y": 200}


def test_common_context_counts_once() -> None:
    """Those who share a long beginning share the pages of it."""
    full = worker("full", Role.DECODE, context_tokens=199_000)
    ask = Demand(20_000, 100)
    assert room_s(ask, but(full, held_tokens=19_900)) == 0 < room_s(ask, full)
    emptier = but(full, context_tokens=150_000)
    shared = decode_s(ask, but(emptier, held_tokens=19_900))
    assert shared == pytest.approx(decode_s(ask, but(emptier, context_tokens=150_000 - 19_900)))


def test_prefill_home_decides_between_near_equals() -> None:
    ask = Demand(2000, 100, home_prefill="q")
    workers = [PREFILL, worker("q", Role.PREFILL, queued_tokens=100), DECODE]
    assert decision(workers, ask).prefill == workers[1]


def test_a_failed_worker_is_not_used_again_while_there_is_another() -> None:
    ask = Demand(2000, 100, avoid=frozenset("a"))
    assert names([worker("a"), worker("b", queued_tokens=100_000)], ask) == {"b": 200}
    assert decision([worker("a")], ask).decode.id == "a"


def test_a_failed_prefill_worker_leaves_the_prompt_to_decode() -> None:
    assert decision([PREFILL, DECODE], Demand(2000, 100, avoid=frozenset("p"))).prefill is None


def test_a_penalty_is_only_a_cost() -> None:
    assert decision([worker("a", penalty_s=2), worker("b")]).decode.id == "b"
    assert decision([worker("a", penalty_s=2), worker("b", queued_tokens=50_000)]).decode.id == "a"


def test_decode_goes_where_there_is_room() -> None:
    full = worker("full", Role.DECODE, context_tokens=199_000)
    crowded = worker("crowded", Role.DECODE, sequences=32)
    assert decision([full, crowded, DECODE]).decode is DECODE
    ask = Demand(2000, 100)
    assert room_s(ask, full) > room_s(ask, DECODE) == 0
    assert room_s(ask, crowded) == 0, "nobody has any context there: it is as good as over"
    crowded = but(crowded, context_tokens=1000)
    assert room_s(ask, crowded) > room_s(ask, but(crowded, sequences=31)) == 0


@given(
    count=st.integers(1, 64),
    each=st.integers(100, 4000),
    left=st.integers(1, 2000),
    need=st.integers(1, 64),
    promised=st.integers(0, 20),
)
def test_room_comes_as_sequences_end(count: int, each: int, left: int, need: int, promised: int) -> None:
    """The naive reference: so many sequences of one length, the first of which ends with the next step and the last in
    twice the mean; a request needs the room of `need` of them beside what there is. Of these some are held back for the
    worker as well."""
    need, promised = min(need, count), min(promised, count - 1)
    capacity = count * each
    full = worker(
        "a",
        Role.DECODE,
        sequences=count - promised,
        context_tokens=(count - promised) * each,
        kv_capacity_tokens=capacity,
        max_running=1000,
        left_tokens=float(left),
        step=StepCost(0.02, 0.0, 0.0),
    )
    ask = Demand(need * each - 1, 1, closed={"a": HeldWork(0, promised, promised * each)} if promised else {})
    ends = sorted(2 * left * (number + 0.5) / count * 0.02 for number in range(count))
    waited_s = ends[need - 1]
    assert room_s(ask, full) == pytest.approx(waited_s, abs=0.5001 * 2 * left * 0.02 / count)
    assert room_s(ask, but(full, kv_capacity_tokens=2 * capacity)) == 0


def test_what_is_left_of_the_answers_there_decides_who_has_room_first() -> None:
    full = but(DECODE, sequences=10, context_tokens=240_000, left_tokens=500.0)
    soon = but(full, id="soon", left_tokens=20.0)
    assert decision([full, soon, PREFILL]).decode is soon
    made = decision([but(full, id="unknown", left_tokens=0.0), PREFILL], Demand(2000, 1000))
    assert made.chosen.room_s < room_s(Demand(2000, 1000), full)


def test_room_is_waited_for_while_the_prompt_is_computed() -> None:
    """Elsewhere all of that time; where it is computed only in the queue before it."""
    full = but(DECODE, sequences=10, context_tokens=200_000, left_tokens=2000.0)
    ask = Demand(4000, 100)
    wait_s = room_s(ask, full)
    assert wait_s > 1.5
    moved = decision([PREFILL, full], ask).chosen
    assert moved.prefill is not None
    assert moved.room_s == pytest.approx(wait_s - 0.8 - moved.handoff_s)
    assert moved.first_token_s == pytest.approx(0.8), "the client has that before"
    assert moved.total_s == pytest.approx(wait_s + moved.answer_s)
    here = decision([but(full, queued_tokens=5000)], ask).chosen
    assert here.room_s == pytest.approx(wait_s - 1.0)
    assert here.first_token_s == pytest.approx(wait_s + 0.8)
    assert here.total_s == pytest.approx(here.first_token_s + here.answer_s)


def test_an_idle_worker_begins_with_what_may_outgrow_it() -> None:
    """Nobody's end would make more room there."""
    ask, small = Demand(2000, 100, waits=True), but(DECODE, kv_capacity_tokens=2050)
    assert isinstance(pick([small], ask), Decision)
    assert isinstance(pick([but(small, sequences=1, context_tokens=100)], ask), Waits)


def test_what_no_worker_gives_is_said_of_the_best() -> None:
    slow, quick = but(DECODE, id="slow", step=step(0.05)), but(DECODE, id="quick", step=step(0.02))
    for workers in ([slow, quick], [quick, slow]):
        unmet = pick(workers, Demand(2000, 100, token_s=0.001))
        assert isinstance(unmet, Unmet) and unmet.target == "token"
        assert unmet.best_s == step_s(Demand(2000, 100), quick) < step_s(Demand(2000, 100), slow)
        unmet = pick([but(one, queued_tokens=5000) for one in workers], Demand(2000, 100, first_token_s=0.1))
        assert unmet == Unmet("first_token", pytest.approx(7000 / 5000))


def test_every_cost_grows_with_its_cause() -> None:
    ask, base = Demand(2000, 100), worker("a", cached_tokens=500)
    slower = PromptTokenCost(1 / 5000, 1e-9)
    for change in (
        {"queued_tokens": 5},
        {"prefill_rate": 4999},
        {"cached_tokens": 499},
        {"fetch_s": 1e-5},
        {"prompt": slower},
    ):
        assert seconds(ask, but(base, **change)) > seconds(ask, base), change
    for change in ({"sequences": 1}, {"context_tokens": 1}, {"step": step(0.021)}, {"penalty_s": 0.1}):
        assert decode_s(ask, but(base, **change)) > decode_s(ask, base), change


def test_nobody_decodes() -> None:
    assert isinstance(pick([]), NoWorker)
    assert isinstance(pick([PREFILL]), NoWorker)


def test_too_long_for_all_is_an_answer() -> None:
    answer = pick([worker("a", max_model_len=1000), worker("b", kv_capacity_tokens=1500)])
    assert answer == TooLong(1500)
    assert decision([worker("a", max_model_len=1000), worker("b")]).decode.id == "b"
    assert decision([but(PREFILL, max_model_len=1000), DECODE]).prefill is None


def test_a_long_queue_is_an_answer_but_a_long_prompt_is_not() -> None:
    answer = pick([worker("a", queued_tokens=10_000, prefill_rate=1000)], max_queue_s=9)
    assert answer == QueueFull(10.0)
    assert decision([worker("a", prefill_rate=100)], max_queue_s=9).chosen.first_token_s == 20
