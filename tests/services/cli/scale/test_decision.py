"""The planner's decision: bounds, rest, order of means, and that nobody is lost."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.scale.decision import decide
from penstock.cli.scale.state import ROLES, ScaleMemory, WorkerSeen, WorkRole

from .seen import KNOBS, PACE, Fleet

RATES = st.floats(0, 60_000)
LOADS = st.fixed_dictionaries(
    {
        "requests_per_s": st.floats(0, 50),
        "prompt_tokens_per_s": RATES,
        "answer_tokens": st.floats(0, 10_000),
        "backlog_tokens": st.floats(0, 1e6),
        "sequences": st.floats(0, 384),
        "kv_used": st.floats(0, 6),
        "judged": st.integers(0, 1000),
        "ttft_met": st.floats(0, 1),
        "itl_met": st.floats(0, 1),
        "can_add": st.booleans(),
    }
)
CAUSES = ["prompt_tokens_per_s", "answer_tokens", "backlog_tokens", "sequences", "kv_used"]
STEADY = st.fixed_dictionaries(
    {
        "requests_per_s": st.floats(0.1, 20),
        "prompt_tokens_per_s": RATES,
        "answer_tokens": st.floats(0, 400),
        "judged": st.just(100),
    }
)
UP, DOWN = ("add", "undrain"), ("drain",)


def turns(fleet: Fleet, role: WorkRole) -> list[bool]:
    """Up (true) and down, each as often as the direction has changed."""
    kinds = [action.kind for _, action in fleet.actions if action.role == role and action.kind in (*UP, *DOWN)]
    ups = [kind in UP for kind in kinds]
    return [up for number, up in enumerate(ups) if number == 0 or up is not ups[number - 1]]


@settings(max_examples=60, deadline=None)
@given(st.lists(LOADS, min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 6))
def test_whatever_comes_the_bounds_hold(loads: list[dict[str, float]], prefill: int, decode: int) -> None:
    fleet = Fleet(prefill, decode)
    for load in loads:
        fleet.look(**load)
        for role in ROLES:
            assert KNOBS.least[role] <= fleet.count(role) <= KNOBS.most[role]


@settings(max_examples=30, deadline=None)
@given(STEADY, st.integers(1, 6), st.integers(1, 6))
def test_a_steady_load_comes_to_rest(load: dict[str, float], prefill: int, decode: int) -> None:
    """At most there are some more for a while at the beginning, for what has to wait until they are there."""
    fleet = Fleet(prefill, decode)
    for _ in range(120):
        fleet.look(**load)
    assert [action for at, action in fleet.actions if at > 1000 + 60 * KNOBS.every_s] == []
    for role in ROLES:
        assert turns(fleet, role) in ([], [True], [False], [True, False])
        assert fleet.count(role) == fleet.want[role]


@settings(max_examples=10, deadline=None)
@given(STEADY, st.floats(0, 0.8), st.floats(0, 0.8))
def test_targets_that_stay_missed_make_a_role_grow_until_it_is_enough(
    load: dict[str, float], ttft: float, itl: float
) -> None:
    fleet = Fleet(6, 6)
    for _ in range(600):
        fleet.look(**load, ttft_met=ttft, itl_met=itl)
    assert [action for at, action in fleet.actions if at > 1000 + 500 * KNOBS.every_s] == []
    for role in ROLES:
        assert turns(fleet, role) in ([], [True], [False], [False, True])


@settings(max_examples=100, deadline=None)
@given(
    LOADS,
    st.floats(1, 5),
    st.sampled_from(CAUSES),
)
def test_more_load_never_wants_fewer(load: dict[str, float], factor: float, what: str) -> None:
    def wanted(load: dict[str, float]) -> dict[str, int]:
        decision, _ = decide(Fleet(3, 3).seen(**load), ScaleMemory(), KNOBS)
        return dict(decision.want)

    less, more = wanted(load), wanted(load | {what: load[what] * factor})
    assert all(more[role] >= less[role] for role in ROLES)


@settings(max_examples=60, deadline=None)
@given(st.lists(LOADS, min_size=5, max_size=60))
def test_what_runs_keeps_its_places(loads: list[dict[str, float]]) -> None:
    """No drain leaves fewer decode workers than the batches and the memory of the running answers fill."""
    fleet = Fleet(6, 6)
    for load in loads:
        before = fleet.count("decode")
        actions = fleet.look(**load)
        if any(action.kind in ("drain", "flip") for action in actions) and fleet.count("decode") < before:
            full = max(load["sequences"] / PACE.max_running, load["kv_used"])
            assert fleet.count("decode") >= min(before, ceil(full - 1e-6))


def test_a_role_that_lacks_workers_gets_those_that_the_other_can_spare_first() -> None:
    fleet = Fleet(1, 4)
    for _ in range(4):
        fleet.look(prompt_tokens_per_s=1000.0)
    assert fleet.actions == []
    for _ in range(3):
        fleet.look(prompt_tokens_per_s=20_000.0, backlog_tokens=100_000.0)
    kinds = fleet.kinds()
    assert kinds[:3] == ["flip"] * 3 and set(kinds[3:]) <= {"add"}
    assert fleet.count("decode") == 1


def test_what_the_other_role_had_to_do_lately_is_not_to_spare() -> None:
    fleet = Fleet(1, 3)
    for _ in range(6):
        fleet.look(answer_tokens=750.0)
    assert fleet.want["decode"] >= 2
    fleet.look(backlog_tokens=500_000.0)
    spared = fleet.kinds().count("flip")
    assert spared <= 3 - fleet.want["decode"]
    assert "add" in fleet.kinds()


def test_who_drains_comes_back_before_anybody_is_started() -> None:
    fleet = Fleet(4, 1)
    while "drain" not in fleet.kinds():
        fleet.look(prompt_tokens_per_s=100.0)
        fleet.workers = {name: replace(one, busy=1) for name, one in fleet.workers.items()}
    assert fleet.count("prefill") == 1
    fleet.look(prompt_tokens_per_s=1000.0, backlog_tokens=900_000.0)
    kinds = fleet.kinds()
    assert "undrain" in kinds
    assert "add" not in kinds[: kinds.index("undrain")]
    assert "remove" not in kinds, "something runs there"


def test_who_drains_in_the_other_role_changes_it_and_is_back() -> None:
    fleet = Fleet(4, 1)
    while "drain" not in fleet.kinds():
        fleet.look()
        fleet.workers = {name: replace(one, busy=1) for name, one in fleet.workers.items()}
    for _ in range(7):
        fleet.look(sequences=500.0)
    kinds = fleet.kinds()
    assert kinds.count("drain") == kinds.count("undrain") == kinds.count("flip") == 3
    assert "add" not in kinds[: kinds.index("undrain")]
    assert fleet.count("prefill") == 1


def test_a_worker_is_removed_when_it_is_drained_and_nothing_runs_there() -> None:
    fleet = Fleet(2, 1)
    fleet.workers = {name: replace(one, busy=1) for name, one in fleet.workers.items()}
    while "drain" not in fleet.kinds():
        fleet.look()
    for _ in range(5):
        fleet.look()
    assert "remove" not in fleet.kinds()
    fleet.workers = {name: replace(one, busy=0) for name, one in fleet.workers.items()}
    fleet.look()
    assert fleet.kinds() == ["drain", "remove"]
    assert len(fleet.workers) == 2


def test_who_drains_and_is_away_for_a_moment_is_removed_all_the_same() -> None:
    """Its router has started again."""
    fleet = Fleet(2, 1)
    fleet.workers = {name: replace(one, busy=1) for name, one in fleet.workers.items()}
    while "drain" not in fleet.kinds():
        fleet.look()
    all_of_them = fleet.workers
    fleet.workers = {name: one for name, one in all_of_them.items() if not one.draining}
    fleet.now += 300
    fleet.look()
    fleet.workers = {name: replace(one, busy=0) for name, one in all_of_them.items()}
    while "remove" not in fleet.kinds():
        fleet.look()


def test_nobody_is_removed_while_another_is_started() -> None:
    """Kubernetes would end the one that has not begun."""
    fleet = Fleet(3, 1)
    while "drain" not in fleet.kinds():
        fleet.look()
    fleet.starting.append((fleet.now + 3600, "decode"))
    for _ in range(20):
        fleet.look()
    assert "remove" not in fleet.kinds()
    fleet.starting.clear()
    while "remove" not in fleet.kinds():
        fleet.look()


def test_a_planner_that_has_just_begun_changes_no_roles() -> None:
    """It does not know whether who has little to do had little to do before."""
    fleet = Fleet(3, 1)
    fleet.look(sequences=500.0)
    assert "flip" not in fleet.kinds() and "add" in fleet.kinds()


def test_who_is_drained_by_somebody_else_is_left_alone() -> None:
    fleet = Fleet(1, 2)
    other = WorkerSeen(id="theirs", role="prefill", ready=False, draining=True)
    fleet.workers["theirs"] = other
    for _ in range(60):
        fleet.look(backlog_tokens=400_000.0)
    assert all(action.worker != "theirs" for _, action in fleet.actions)
    assert fleet.workers["theirs"] == other


def test_where_the_actuator_fails_nothing_is_ordered_and_roles_still_change() -> None:
    fleet = Fleet(1, 3)
    for _ in range(5):
        fleet.look(can_add=False)
    fleet.look(can_add=False, backlog_tokens=900_000.0)
    assert set(fleet.kinds()) == {"flip"}


def test_a_worker_that_cannot_be_removed_changes_places_with_one_that_can() -> None:
    """The prefill workers would be started again by whoever started them; a decode worker is the actuator's."""
    fleet = Fleet(2, 1)
    fleet.workers = {name: replace(one, removable=one.role == "decode", id=name) for name, one in fleet.workers.items()}
    for _ in range(60):
        fleet.look()
    assert fleet.kinds() == ["flip", "drain", "remove"]
    assert (fleet.count("prefill"), fleet.count("decode")) == (1, 1)


def test_targets_that_are_missed_with_the_wanted_workers_raise_what_is_planned_for() -> None:
    fleet = Fleet(2, 2)
    load = {"prompt_tokens_per_s": 8000.0, "judged": 200, "ttft_met": 0.5}
    for _ in range(200):
        fleet.look(**load)
    strained = fleet.want["prefill"]
    assert fleet.memory.strain["prefill"] > 1 and fleet.memory.strain["decode"] == 1
    calm = Fleet(2, 2)
    for _ in range(200):
        calm.look(**load | {"ttft_met": 1.0})
    assert strained > calm.want["prefill"]


def test_workers_that_compute_less_than_they_could_are_taken_for_what_they_do() -> None:
    """As those that have answers to end beside prompts: a backlog would stay for as long as these do."""

    def wanted(computed: float) -> int:
        fleet = Fleet(4, 1, replace(KNOBS, most=dict.fromkeys(ROLES, 20)))
        for _ in range(10):
            fleet.look(prompt_tokens_per_s=18_000.0, backlog_tokens=200_000.0, computed_per_s=computed, can_add=False)
        return fleet.want["prefill"]

    assert wanted(20_000.0) < wanted(12_000.0)
    assert wanted(0.0) < 12, "where nothing is seen to be computed, that is no reason for as many as there may be"


def test_every_action_says_why() -> None:
    fleet = Fleet(1, 1)
    fleet.look(backlog_tokens=400_000.0)
    [*_, action] = [action for _, action in fleet.actions]
    assert "prefill workers are needed and 1 are there" in action.reason
    assert "400,000 wait" in action.reason
