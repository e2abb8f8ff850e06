"""The planner with a clock of its own: what is believed of workers, and for how long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import NotFound, Overloaded, Refused, Unavailable
from penstock.kv.spec import KvSpec
from penstock.router.config import RouterConfig
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk, Planned
from penstock.router.registry import Measured, Member, Report, Seat
from penstock.router.running import RunningPlan
from penstock.router.workers import Role

SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="float32", block_size=16, block_bytes=4096)


class Desk:
    """A planner, its clock and its members."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.planner = Planner(RouterConfig(seed=3, **settings), lambda: self.now)

    def join(
        self, name: str, role: Role = Role.BOTH, spec: KvSpec = SPEC, host: str = "h", *, model: str = "m", **other: Any
    ) -> Seat:
        return self.planner.registry.join(
            Member(
                id=name,
                role=role,
                address=f"{name}:1",
                host_id=host,
                model=model,
                spec=spec,
                max_model_len=32_768,
                max_running=32,
                kv_capacity_tokens=200_000,
                **other,
            ),
            self.now,
        )

    def plan(self, tokens: int = 1000, *, model: str = "m", **fields: Any) -> Planned:
        return self.planner.plan(PlanAsk(model=model, prompt_tokens=tokens, max_tokens=100, **fields))

    def spread(self, count: int = 40, **fields: Any) -> Counter[str]:
        """Where so many requests would go, one at a time."""
        found: Counter[str] = Counter()
        for _ in range(count):
            planned = self.plan(**fields)
            self.planner.release(planned.number)
            found[planned.decode.id] += 1
        return found


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_fault_is_forgotten_by_itself(desk: Desk) -> None:
    seats = [desk.join("a"), desk.join("b")]
    desk.planner.release(desk.plan(avoid=frozenset("a")).number)
    assert set(desk.spread()) == {"b"}
    desk.now += 3.1
    for seat in seats:
        seat.hear(Report(free_kv_tokens=200_000), desk.now)
    assert set(desk.spread()) == {"a"}, "who has computed least of late"
    assert set(desk.spread()) == {"a", "b"}


def test_of_equals_each_computes_as_much(desk: Desk) -> None:
    for name in "abc":
        desk.join(name)
    sizes = [number * 997 % 5000 + 100 for number in range(300)]
    computed: Counter[str] = Counter()
    for tokens in sizes:
        planned = desk.plan(tokens)
        desk.planner.release(planned.number)
        computed[planned.decode.id] += tokens
    assert max(computed.values()) <= 1.02 * sum(sizes) / 3


def test_who_had_no_room_is_no_worse_for_others(desk: Desk) -> None:
    desk.join("a")
    desk.join("b")
    for _ in range(5):
        full = desk.plan(avoid=frozenset("a"), full=frozenset("a"))
        assert full.decode.id == "b"
        desk.planner.release(full.number)
    assert set(desk.spread()) == {"a", "b"}


def test_the_name_of_an_unknown_member_does_no_harm(desk: Desk) -> None:
    desk.join("a")
    assert set(desk.spread(avoid=frozenset({"left long ago"}))) == {"a"}


def test_a_silent_worker_gets_nothing_until_it_speaks() -> None:
    desk = Desk(silent_s=5.0)
    quiet, other = desk.join("quiet"), desk.join("other")
    desk.now += 4
    other.hear(Report(free_kv_tokens=200_000), desk.now)
    desk.now += 2
    assert set(desk.spread()) == {"other"}
    quiet.hear(Report(free_kv_tokens=200_000), desk.now)
    assert set(desk.spread(100)) == {"quiet", "other"}
    desk.now += 6
    assert [model.ready for model in desk.planner.registry.view(desk.now).models] == [False]
    with pytest.raises(Unavailable):
        desk.plan()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def two_hosts(desk: Desk, one: Role, two: Role) -> None:
    """A worker and a store on each; blocks 0 to 49 are in the store of the first, 0 to 9 in that of the second."""
    desk.join("a", one, host="one").measure(Measured(1000, 1e9, 1e9), desk.now)
    desk.join("b", two, host="two").measure(Measured(1000, 1e9, 1e9), desk.now)
    for name, blocks in (("one", 50), ("two", 10)):
        desk.planner.registry.join(Member(id=f"store-{name}", role=None, address=f"{name}:2", host_id=name), desk.now)
        desk.planner.index.stored(f"store-{name}", map(key, range(blocks)))


def test_a_worker_is_told_whose_store_has_the_rest(desk: Desk) -> None:
    two_hosts(desk, Role.BOTH, Role.BOTH)
    keys = [key(number) for number in range(60)]
    home = desk.plan(block_keys=keys)
    assert (home.decode.id, home.cached_tokens, list(home.decode_sources)) == ("a", 800, [])
    moved = desk.plan(block_keys=keys, avoid=frozenset("a"))
    assert (moved.decode.id, moved.cached_tokens, list(moved.decode_sources)) == ("b", 800, ["one:2"])
    unknown = desk.plan(block_keys=[key(10**6)], avoid=frozenset("a"))
    assert list(unknown.decode_sources) == []


def test_what_every_pull_costs_is_learned(desk: Desk) -> None:
    """As long as it is not known, it is what the settings say: 10 ms."""
    two_hosts(desk, Role.BOTH, Role.BOTH)
    ask = {"block_keys": [key(number) for number in range(60)], "avoid": frozenset("a")}
    guessed = desk.plan(**ask)
    assert guessed.decision.chosen.prompt.pull_s == pytest.approx(0.01, abs=0.001)
    desk.planner.release(guessed.number)
    seat = desk.planner.registry.get("b")
    assert seat is not None
    seat.measure(Measured(remote_overhead_s=0.3, fetch_overhead_s=0.02), desk.now)
    learned = desk.plan(**ask)
    assert list(learned.decode_sources) == ["one:2"]
    assert learned.decision.chosen.prompt.pull_s == pytest.approx(0.3, abs=0.001)
    assert learned.decision.chosen.prompt.fetch_s == pytest.approx(0.02, abs=0.001)
    desk.planner.release(learned.number)
    seat.measure(Measured(remote_overhead_s=0.7), desk.now)
    assert list(desk.plan(**ask).decode_sources) == [], "to compute 640 tokens takes 0.64 s"


def test_a_worker_is_told_where_others_compute_what_it_lacks(desk: Desk) -> None:
    """As long as they do; not of what its own host computes, nor where computing is quicker than the way."""
    two_hosts(desk, Role.BOTH, Role.BOTH)
    new = [key(number) for number in range(1000, 1060)]
    first = desk.plan(block_keys=new, avoid=frozenset("b"))
    assert (first.decode.id, list(first.decode_sources)) == ("a", [])
    second = desk.plan(block_keys=[*new[:40], key(5000)], avoid=frozenset("a"))
    assert (second.decode.id, second.cached_tokens, list(second.decode_sources)) == ("b", 0, ["one:2"])
    third = desk.plan(block_keys=new[:40], avoid=frozenset("a"))
    assert list(third.decode_sources) == [], "its own host computes them as well by now"
    for planned in (second, third):
        desk.planner.release(planned.number)
    seat = desk.planner.registry.get("b")
    assert seat is not None
    seat.measure(Measured(1000, 1e9, 1000), desk.now)
    slow = desk.plan(block_keys=new, avoid=frozenset("a"))
    assert list(slow.decode_sources) == []
    seat.measure(Measured(1000, 1e9, 1e9), desk.now)
    for planned in (slow, first):
        desk.planner.release(planned.number)
    assert list(desk.plan(block_keys=new, avoid=frozenset("a")).decode_sources) == []


def test_what_another_host_has_and_computes_is_one_run(desk: Desk) -> None:
    two_hosts(desk, Role.BOTH, Role.BOTH)
    keys = [key(number) for number in range(80)]
    assert desk.plan(block_keys=keys, avoid=frozenset("b")).cached_tokens == 800
    moved = desk.plan(block_keys=keys, avoid=frozenset("a"))
    assert (moved.cached_tokens, list(moved.decode_sources)) == (800, ["one:2"])


def test_who_has_left_computes_for_nobody(desk: Desk) -> None:
    """Its plan lives on, as its stream goes on elsewhere, and others have the same beginning."""
    two_hosts(desk, Role.BOTH, Role.BOTH)
    new = [key(number) for number in range(1000, 1060)]
    first = desk.plan(block_keys=new, avoid=frozenset("b"))
    seat = desk.planner.registry.get("a")
    assert seat is not None and first.decode.id == "a"
    desk.planner.registry.leave(seat)
    second = desk.plan(block_keys=new)
    assert (second.decode.id, second.cached_tokens, list(second.decode_sources)) == ("b", 0, [])
    for planned in (first, second):
        desk.planner.release(planned.number)
    assert desk.planner.ledger.empty


def test_a_slow_way_between_hosts_is_not_taken(desk: Desk) -> None:
    two_hosts(desk, Role.BOTH, Role.BOTH)
    seat = desk.planner.registry.get("b")
    assert seat is not None
    seat.measure(Measured(1000, 1e9, 1000), desk.now)
    moved = desk.plan(block_keys=[key(number) for number in range(60)], avoid=frozenset("a"))
    assert (moved.cached_tokens, list(moved.decode_sources)) == (160, [])


def test_a_hand_off_to_another_host_names_the_store_of_the_first(desk: Desk) -> None:
    two_hosts(desk, Role.PREFILL, Role.DECODE)
    planned = desk.plan(5000, block_keys=[key(number) for number in range(60)])
    assert planned.prefill is not None
    assert (planned.prefill.id, planned.decode.id) == ("a", "b")
    assert (list(planned.prefill_sources), list(planned.decode_sources)) == ([], ["one:2"])


def test_the_cost_of_context_is_learned(desk: Desk) -> None:
    """As long as it is not known, a token costs what the rate says, wherever it stands."""
    seat = desk.join("a")
    seat.measure(Measured(1000), desk.now)
    compute_s = lambda: desk.plan(10_000).decision.chosen.prompt.compute_s  # noqa: E731
    assert compute_s() == pytest.approx(10.0)
    seat.measure(Measured(prompt_s=0.0005, prompt_context_s=1e-7), desk.now)
    assert compute_s() == pytest.approx(5.0 + 10_000**2 / 2 * 1e-7)


def test_what_every_hand_off_costs_is_learned(desk: Desk) -> None:
    """As long as it is not known, it is what the settings say, 10 ms, and as many bytes as a fetch."""
    two_hosts(desk, Role.PREFILL, Role.DECODE)
    seat = desk.join("c", Role.DECODE, host="one")
    seat.measure(Measured(1000, 1e9, 1e9, 0.001), desk.now)
    ask = {"tokens": 5000, "avoid": frozenset("b")}
    guessed = desk.plan(**ask)
    assert guessed.decision.chosen.handoff_s == pytest.approx(0.01 + 5000 * 256 / 1e9)
    desk.planner.release(guessed.number)
    seat.measure(Measured(handoff_overhead_s=0.002, handoff_rate=1e12), desk.now)
    learned = desk.plan(**ask)
    assert learned.prefill is not None and learned.decision.chosen.handoff_s == pytest.approx(0.002, abs=0.001)
    desk.planner.release(learned.number)
    seat.measure(Measured(handoff_overhead_s=11.0), desk.now)
    assert desk.plan(**ask).prefill is None, "to compute 5000 tokens delays an answer by 5 s"


def test_a_host_without_a_store_is_told_of_none(desk: Desk) -> None:
    two_hosts(desk, Role.BOTH, Role.BOTH)
    desk.join("c", host="three")
    planned = desk.plan(block_keys=[key(number) for number in range(60)], avoid=frozenset("ab"))
    assert (planned.decode.id, list(planned.decode_sources)) == ("c", [])


def test_of_the_idle_those_that_had_less_to_do_get_more(desk: Desk) -> None:
    """Also where not all of them are looked at."""
    for number in range(40):
        desk.join(f"w{number}").measure(Measured(1000, 1e9, 1e9, 0.001), desk.now)
    found = desk.spread(400)
    assert set(found.values()) <= set(range(8, 13)), found


def test_an_old_measurement_counts_less_and_less(desk: Desk) -> None:
    slow, fast = desk.join("slow"), desk.join("fast")
    slow.measure(Measured(100), desk.now)
    fast.measure(Measured(10_000), desk.now)
    assert set(desk.spread(tokens=5000)) == {"fast"}
    desk.now += 600
    for seat in (slow, fast):
        seat.hear(Report(free_kv_tokens=200_000), desk.now)
    assert set(desk.spread(tokens=5000)) == {"slow", "fast"}


def test_a_repeated_rate_is_no_new_measurement(desk: Desk) -> None:
    seat, other = desk.join("a"), desk.join("b")
    other.measure(Measured(1900), desk.now)
    seat.measure(Measured(100), desk.now)
    seat.measure(Measured(100), desk.now + 120)
    assert seat.believed(desk.now + 120).prefill_rate == pytest.approx(100 * 0.25 + 1000 * 0.75)
    seat.measure(Measured(0), desk.now + 121)
    assert seat.measured.prefill_rate == 100


def test_what_is_assumed_of_new_workers_is_the_mean_of_the_others(desk: Desk) -> None:
    """Of those that are there, and of their model."""
    new, left = desk.join("new"), desk.join("left")
    desk.join("another model's", model="n").measure(Measured(9999), desk.now)
    assumed = new.believed(desk.now)
    for rate in (1000, 3000, 2000):
        left.measure(Measured(rate, 0, 0, 0.03), desk.now)
    desk.join("b").measure(Measured(4000), desk.now)
    assert new.believed(desk.now)[:4] == (3000, assumed.fetch_rate, assumed.remote_rate, 0.03)
    desk.planner.registry.leave(left)
    assert new.believed(desk.now) == assumed._replace(prefill_rate=4000)


def test_a_step_is_guessed_from_one_under_load(desk: Desk) -> None:
    seat = desk.join("a")
    seat.hear(Report(running=16, free_kv_tokens=100_000), desk.now)
    guess = seat.step_of(0.04)
    assert guess.base_s == pytest.approx(0.02)
    assert guess.seconds(16, 100_000) == pytest.approx(0.04)


def test_reports_and_charges_are_not_counted_twice(desk: Desk) -> None:
    seat = desk.join("a")
    planner = desk.planner
    ahead = lambda: planner._observer.ahead(seat)[0]  # noqa: E731
    first = desk.plan(1000)
    assert ahead() == 1000  # nothing reported yet: the ledger alone
    desk.now += 1
    seat.hear(Report(running=1, queued_tokens=400, free_kv_tokens=200_000), desk.now)
    assert ahead() == 400  # the report knows how far it is
    second = desk.plan(700)
    assert ahead() == 1100  # and can't know of what is still on its way
    desk.now += 0.01
    seat.hear(Report(running=2, queued_tokens=1000, free_kv_tokens=200_000), desk.now)
    assert ahead() == 1700  # it may, or may not: at most the ledger
    planner.prefilled(first.number)
    assert ahead() == 1000  # at most the ledger, at least the report
    planner.release(second.number)
    seat.hear(Report(queued_tokens=5000, free_kv_tokens=200_000), desk.now)
    assert ahead() == 5000  # work of another router
    planner.release(first.number)
    assert planner.ledger.empty


def test_work_of_another_router_is_seen(desk: Desk) -> None:
    busy = desk.join("busy")
    desk.join("idle")
    busy.hear(Report(running=30, waiting=10, queued_tokens=20_000, free_kv_tokens=0), desk.now)
    assert set(desk.spread()) == {"idle"}


def test_a_session_goes_home_but_not_into_a_queue(desk: Desk) -> None:
    desk.join("a")
    desk.join("b")
    home = desk.plan(session="s").decode.id
    desk.planner.release(1)
    assert set(desk.spread(session="s")) == {home}
    for _ in range(10):
        seat = desk.planner.registry.get(home)
        assert seat is not None
        seat.hear(Report(running=20, queued_tokens=20_000, free_kv_tokens=1000), desk.now)
    assert desk.plan(session="s").decode.id != home


def test_workers_of_two_models_are_kept_apart(desk: Desk) -> None:
    """Neither plans, homes nor rates of one model use workers of the other; each spec is checked within its model."""
    other = replace(SPEC, model="ef" * 32, block_size=32, block_bytes=9999)
    for name, model, spec in (("a", "m", SPEC), ("b", "m", SPEC), ("x", "n", other), ("y", "n", other)):
        desk.join(name, spec=spec, model=model)
    for model, mine in (("m", {"a", "b"}), ("n", {"x", "y"})):
        assert desk.spread(model=model).keys() == mine
        assert len(desk.spread(model=model, session="s")) == 1, "a session has a home for each of its models"
    seen = desk.planner.registry.view(desk.now).models
    assert [(model.model, model.spec, model.decode_workers) for model in seen] == [("m", SPEC, 2), ("n", other, 2)]
    with pytest.raises(Refused, match="does not fit the others that serve 'n'"):
        desk.join("z", spec=SPEC, model="n")
    for name in ("x", "y"):
        seat = desk.planner.registry.get(name)
        assert seat is not None
        seat.drain()
    with pytest.raises(Unavailable):
        desk.plan(model="n")
    assert desk.plan().decode.id in {"a", "b"}


def test_stores_serve_their_host(desk: Desk) -> None:
    desk.join("near", host="h1")
    desk.join("far", host="h2")
    for host in ("h1", "h2"):
        desk.planner.registry.join(Member(id=f"store-{host}", role=None, address="s:1", host_id=host), desk.now)
    keys = [bytes([number]) * 32 for number in range(60)]
    desk.planner.index.stored("store-h1", keys)
    planned = desk.plan(1000, block_keys=keys)
    assert (planned.decode.id, planned.cached_tokens) == ("near", 960)


@pytest.mark.parametrize(("tokens", "cached"), [(47, 32), (48, 32), (49, 48), (50, 48)])
def test_all_whole_blocks_before_the_last_token_may_be_cached(desk: Desk, tokens: int, cached: int) -> None:
    desk.join("a")
    desk.planner.registry.join(Member(id="store", role=None, address="s:1", host_id="h"), desk.now)
    keys = [bytes([number]) * 32 for number in range(tokens // 16)]
    desk.planner.index.stored("store", keys)
    assert desk.plan(tokens, block_keys=keys).cached_tokens == cached


def test_a_worker_without_a_store_on_its_host_uses_any(desk: Desk) -> None:
    desk.join("a", host="h1")
    desk.planner.registry.join(Member(id="store", role=None, address="s:1", host_id="h9"), desk.now)
    desk.planner.index.stored("store", [b"k" * 32])
    assert desk.plan(1000, block_keys=[b"k" * 32]).cached_tokens == 16


def test_a_moved_request_charges_what_is_left(desk: Desk) -> None:
    desk.join("a")
    planned = desk.plan(1000, output_tokens=60)
    account = desk.planner.ledger.of("a")
    assert (planned.uncached_tokens, account.context_tokens) == (1060, 1000 + 100)


def test_learned_lengths_shape_the_charge(desk: Desk) -> None:
    desk.join("a")
    ask = PlanAsk(model="m", prompt_tokens=1000, max_tokens=500, tenant="t")
    desk.planner.learn(ask, 30)
    desk.planner.plan(ask)
    assert desk.planner.ledger.of("a").context_tokens == 1030


def test_the_charge_follows_the_answer(desk: Desk) -> None:
    """As long as expected, it is charged already; when it is longer, more is expected."""
    desk.join("a")
    ask = PlanAsk(model="m", prompt_tokens=1000, max_tokens=500, tenant="t")
    desk.planner.learn(ask, 40)
    number = desk.planner.plan(ask).number
    account = desk.planner.ledger.of("a")
    found = []
    for tokens in (0, 10, 30, 100, 480):
        desk.planner.generated(number, tokens)
        found.append(account.context_tokens)
    assert found == [1040, 1040, 1040, 1150, 1500]
    desk.planner.release(number)
    assert desk.planner.ledger.empty


def test_what_is_told_of_a_plan_is_in_the_state_of_its_worker(desk: Desk) -> None:
    desk.join("a")

    def state() -> tuple[int, int]:
        desk.planner.refresh()
        found = desk.planner.state("a")
        assert found is not None
        return found.sequences, found.context_tokens

    ask = PlanAsk(model="m", prompt_tokens=1000, max_tokens=500, tenant="t")
    desk.planner.learn(ask, 40)
    assert state() == (0, 0)
    number = desk.planner.plan(ask).number
    assert state() == (1, 1040)
    desk.planner.generated(number, 480)
    assert state() == (1, 1500)
    kept = desk.planner.keep(ask, RunningPlan("", "a"))
    assert state() == (2, 1500 + 1040)
    for one in (number, kept):
        desk.planner.release(one)
    assert state() == (0, 0)


def test_a_moved_answer_counts_its_earlier_tokens_once(desk: Desk) -> None:
    """A gateway tells how long the whole answer is, whoever generated its beginning."""
    desk.join("a")
    ask = PlanAsk(model="m", prompt_tokens=1000, max_tokens=500, tenant="t", output_tokens=60)
    desk.planner.learn(ask, 100)
    planned = desk.planner.plan(ask)
    account = desk.planner.ledger.of("a")
    assert (planned.expected_output, account.context_tokens) == (40, 1100)
    desk.planner.generated(planned.number, 70)
    assert account.context_tokens == 1100
    desk.planner.generated(planned.number, 400)
    assert account.context_tokens == 1500, "half of it again, but no more than it may have"


def test_refusals_say_what_to_do(desk: Desk) -> None:
    with pytest.raises(Unavailable, match="no worker has joined"):
        desk.plan()
    seat = desk.join("a")
    with pytest.raises(NotFound, match="'other' is not served here"):
        desk.planner.plan(PlanAsk(model="other", prompt_tokens=10, max_tokens=10))
    seat.drain()
    with pytest.raises(Unavailable, match="draining"):
        desk.plan()


def test_members_are_bounded_and_must_fit() -> None:
    desk = Desk(max_members=2)
    first = desk.join("a")
    with pytest.raises(Refused, match="dtype is 'bfloat16' here and 'float32' there"):
        desk.join(
            "b", spec=KvSpec(model="m", tokenizer="t", layout="v1", dtype="bfloat16", block_size=16, block_bytes=2048)
        )
    desk.join("b")
    with pytest.raises(Overloaded):
        desk.join("c")
    desk.join("b")  # again: takes its own place
    for seat in (first, desk.planner.registry.get("b")):
        assert seat is not None
        desk.planner.registry.leave(seat)
    desk.join(
        "d", spec=KvSpec(model="m", tokenizer="t", layout="v1", dtype="bfloat16", block_size=16, block_bytes=2048)
    )  # nobody is left to differ from


def test_thousands_of_refused_requests_change_nothing(desk: Desk) -> None:
    desk.join("a")
    desk.join("b")
    for _ in range(1000):
        with pytest.raises(NotFound):
            desk.planner.plan(PlanAsk(model="nope", prompt_tokens=10, max_tokens=10))
    assert desk.planner.ledger.empty
    assert all(seat.penalty_s(desk.now) == 0 for seat in desk.planner.registry)
    assert set(desk.spread()) == {"a", "b"}


def agents(count: int, common: int = 60) -> list[list[bytes]]:
    """Keys of prompts that begin with the same blocks; each goes on with blocks of its own."""
    return [[*map(key, range(common)), *(key(1000 * at + own) for own in range(at))] for at in range(1, count + 1)]


def to_compute(prompts: list[tuple[int, list[bytes]]], computed: set[bytes]) -> int:
    """Tokens that a worker computes for prompts, given as lengths and keys, one by one."""
    total, there = 0, set(computed)
    for tokens, keys in prompts:
        shareable = keys[: (tokens - 1) // 16]
        total += tokens - 16 * len(there.intersection(shareable))
        there.update(shareable)
    return total


def test_a_common_beginning_is_predicted_once_and_nobody_is_refused() -> None:
    """Together the prompts are four times as long as the longest queue that is not refused."""
    desk = Desk(max_queue_s=1.0)
    seat = desk.join("a")
    prompts = [(len(keys) * 16 + 5, keys) for keys in agents(8)]
    planner, plans = desk.planner, []
    for number, (tokens, keys) in enumerate(prompts):
        planned = desk.plan(tokens, block_keys=keys)
        plans.append(planned)
        ahead = planner._observer.ahead(seat)[0]
        assert ahead == to_compute(prompts[: number + 1], set())
        assert planned.decision.prompt.awaited == (960 if number else 0)
        assert planned.uncached_tokens == tokens - planned.decision.prompt.awaited
    assert planner.ledger.of("a").context_tokens == to_compute(prompts, set()) + 8 * 100
    desk.now += 1
    seat.hear(Report(running=1, waiting=7, queued_tokens=1000, free_kv_tokens=200_000), desk.now)
    assert planner._observer.ahead(seat)[0] == 1000
    again = desk.plan(*prompts[0][:1], block_keys=prompts[0][1])
    assert planner._observer.ahead(seat)[0] == 1000 + again.uncached_tokens


def test_what_one_leaves_behind_is_computed_for_the_others(desk: Desk) -> None:
    seat = desk.join("a")
    prompts = [(len(keys) * 16 + 5, keys) for keys in agents(3)]
    first, second, third = [desk.plan(tokens, block_keys=keys) for tokens, keys in prompts]
    ahead = lambda: desk.planner._observer.ahead(seat)[0]  # noqa: E731
    desk.planner.release(first.number)
    assert ahead() == to_compute(prompts[1:], set()), "it left before its prompt was computed"
    desk.planner.prefilled(second.number)
    assert ahead() == to_compute(prompts[2:], set(prompts[1][1]))
    desk.planner.release(second.number)
    assert ahead() == to_compute(prompts[2:], set(prompts[1][1])), "what was computed is still there"
    desk.planner.release(third.number)
    assert desk.planner.ledger.empty


def test_a_request_goes_where_its_beginning_is_being_computed(desk: Desk) -> None:
    """It costs nothing there but its own tokens, and elsewhere all of it; until the queue there is the longer way."""
    desk.join("a")
    desk.join("b")
    prompts = [(len(keys) * 16 + 5, keys) for keys in agents(40, common=600)]
    places = [desk.plan(tokens, block_keys=keys).decode.id for tokens, keys in prompts]
    assert len(set(places[:3])) == 1
    assert set(places) == {"a", "b"}
    computed = sum(desk.planner.ledger.of(name).prefill_tokens for name in "ab")
    assert computed == to_compute(prompts, set()) + 600 * 16, "each computes the beginning once"


def test_pages_of_a_worker_are_nearer_than_its_store(desk: Desk) -> None:
    desk.join("a")
    desk.join("b")
    desk.planner.registry.join(Member(id="store", role=None, address="s:1", host_id="h"), desk.now)
    keys = [key(number) for number in range(60)]
    desk.planner.index.stored("store", keys)
    assert set(desk.spread(block_keys=keys)) == {"a", "b"}
    desk.planner.index.stored("b", keys[:40])
    assert set(desk.spread(block_keys=keys)) == {"b"}
    planned = desk.plan(block_keys=keys)
    assert planned.decision.sources == {"worker": 640, "store": 320, "awaited": 0, "remote": 0, "computed": 40}
    desk.planner.index.removed("b", keys[:1])
    desk.planner.release(planned.number)
    assert set(desk.spread(200, block_keys=keys)) == {"a", "b"}


def test_pages_are_worth_nothing_behind_a_long_queue(desk: Desk) -> None:
    desk.join("a")
    seat = desk.join("b")
    keys = [key(number) for number in range(60)]
    desk.planner.index.stored("b", keys)
    assert set(desk.spread(block_keys=keys)) == {"b"}
    seat.hear(Report(running=3, queued_tokens=3000, free_kv_tokens=200_000), desk.now)
    assert set(desk.spread(block_keys=keys)) == {"a"}


def test_a_session_is_decided_with_a_look_at_its_worker(desk: Desk) -> None:
    """And the plan says what the others would have taken at least."""
    for number in range(50):
        desk.join(f"w{number:02}")
    prompt = [key(number) for number in range(500)]
    first = desk.plan(8000, session="s", block_keys=prompt)
    desk.planner.release(first.number)
    desk.planner.index.stored(first.decode.id, prompt)
    second = desk.plan(8100, session="s", block_keys=prompt)
    decision = second.decision
    assert second.decode is first.decode
    assert (desk.planner.shortlist.looked_at, decision.choices) == (1, 50)
    assert decision.other_s is not None and decision.other_s > decision.chosen.total_s
    desk.planner.release(second.number)
    cold = desk.plan(8000)
    assert 1 < desk.planner.shortlist.looked_at < 10, "many are as good as each other"
    assert cold.decision.other_s == pytest.approx(cold.decision.chosen.total_s)


def test_beliefs_fade_of_all_workers_a_few_at_a_time(desk: Desk) -> None:
    """As many decisions later as it takes, each has looked at few."""
    for number in range(50):
        desk.join(f"w{number:02}").measure(Measured(1000 if number else 9000), desk.now)
    desk.planner.refresh()
    known = [desk.planner.state(f"w{number:02}") for number in range(50)]
    desk.now += 60
    changed = []
    for _ in range(4):
        desk.planner.refresh()
        now = [desk.planner.state(f"w{number:02}") for number in range(50)]
        changed.append(sum(before is not after for before, after in zip(known, now, strict=True)))
        known = now
    assert changed == [16, 16, 16, 2]
    first = known[0]
    assert first is not None and 1000 < first.prefill_rate < 9000
