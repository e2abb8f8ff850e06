"""The balancer: who flips, when, and that nobody flips to and fro."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.router.balancer import BalanceKnobs, Flip, Leaning, balance, decode_load, prefill_load
from penstock.router.workers import PromptTokenCost, Role, StepCost, WorkerState

KNOBS = BalanceKnobs(hold_s=1.0, dwell_s=30.0)
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
LOADS = st.floats(0, 3)


def worker(name: str, role: Role, load: float) -> WorkerState:
    """One whose role has that much to do: as seconds of prompts, or as a part of its batch."""
    return WorkerState(
        id=name,
        role=role,
        max_model_len=8192,
        max_running=1000,
        kv_capacity_tokens=1_000_000,
        queued_tokens=round(load * 1000) if role is Role.PREFILL else 0,
        sequences=round(load * 1000) if role is Role.DECODE else 0,
        context_tokens=0,
        prefill_rate=1000.0,
        prompt=PromptTokenCost(0.001, 0.0),
        step=StepCost(0.01, 0.001, 1e-7),
        fetch_s=1e-6,
    )


def fleet(prefill: list[float], decode: list[float]) -> list[WorkerState]:
    return [
        *(worker(f"p{number}", Role.PREFILL, load) for number, load in enumerate(prefill)),
        *(worker(f"d{number}", Role.DECODE, load) for number, load in enumerate(decode)),
    ]


class Ran:
    """A fleet over time, one look a second; each role's work spreads evenly over its workers, whoever they are."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.roles = {
            f"w{number}": Role.PREFILL if number < prefill else Role.DECODE for number in range(prefill + decode)
        }
        self.leaning, self.now = Leaning(), 1000.0
        self.flips: list[tuple[float, Flip]] = []

    def count(self, role: Role) -> int:
        return sum(one is role for one in self.roles.values())

    def look(self, prompts: float, answers: float) -> None:
        """The work of each role, in workers that it would fill."""
        work = {Role.PREFILL: prompts, Role.DECODE: answers}
        states = [worker(name, role, work[role] / self.count(role)) for name, role in self.roles.items()]
        flip, self.leaning = balance(states, self.leaning, self.now, KNOBS)
        if flip is not None:
            assert self.roles[flip.worker] is OTHER[flip.role]
            self.roles[flip.worker] = flip.role
            self.flips.append((self.now, flip))
        self.now += 1.0


def test_the_least_loaded_worker_of_the_idle_role_flips_after_the_dwell_and_no_other_soon() -> None:
    busy = fleet([1.5, 2.0], [0.1, 0.02, 0.1])
    flip, leaning = balance(busy, Leaning(), 100.0, KNOBS)
    assert (flip, leaning.short) == (None, Role.PREFILL)
    flip, leaning = balance(busy, leaning, 129.9, KNOBS)
    assert flip is None
    flip, leaning = balance(busy, leaning, 130.0, KNOBS)
    assert flip == Flip("d1", Role.PREFILL)
    flip, leaning = balance(busy, leaning, 131.0, KNOBS)
    assert flip is None
    flip, leaning = balance(busy, leaning, 159.9, KNOBS)
    assert flip is None


def test_decode_gets_a_worker_too() -> None:
    full = fleet([0.0, 0.1], [1.0])
    _, leaning = balance(full, Leaning(), 0.0, KNOBS)
    flip, _ = balance(full, leaning, 30.0, KNOBS)
    assert flip == Flip("p0", Role.DECODE)


@given(prompts=st.lists(LOADS, min_size=1, max_size=5), answers=st.lists(LOADS, min_size=1, max_size=5))
def test_the_last_worker_of_a_role_and_one_that_is_needed_stay(prompts: list[float], answers: list[float]) -> None:
    states = fleet(prompts, answers)
    for short in Role.PREFILL, Role.DECODE:
        flip, _ = balance(states, Leaning(short, since=0.0), 1000.0, KNOBS)
        if flip is not None:
            giving = [one for one in states if one.role is OTHER[flip.role]]
            loads = [prefill_load(one, 1.0) if one.role is Role.PREFILL else decode_load(one) for one in giving]
            assert len(giving) > 1
            assert sum(loads) / (len(giving) - 1) < 0.4


@settings(max_examples=25)
@given(st.lists(st.tuples(LOADS, LOADS), min_size=2, max_size=120), st.integers(1, 4), st.integers(1, 4))
def test_any_load_flips_rarely_and_leaves_somebody_of_each_role(
    loads: list[tuple[float, float]], prefill: int, decode: int
) -> None:
    ran = Ran(prefill, decode)
    for prompts, answers in loads:
        ran.look(prompts, answers)
        assert ran.count(Role.PREFILL) >= 1
        assert ran.count(Role.DECODE) >= 1
    times = [at for at, _ in ran.flips]
    assert all(later - earlier >= KNOBS.dwell_s for earlier, later in pairwise(times))


@settings(max_examples=25)
@given(st.integers(1, 29), st.integers(1, 29), st.integers(2, 4), st.integers(2, 4))
def test_a_load_that_alternates_faster_than_the_dwell_moves_nobody(
    high: int, low: int, prefill: int, decode: int
) -> None:
    ran = Ran(prefill, decode)
    while ran.now < 1600:
        phase = (ran.now - 1000) % (high + low) < high
        ran.look(10.0 if phase else 0.0, 0.0 if phase else 10.0)
    assert not ran.flips


@settings(max_examples=25)
@given(st.floats(0, 3), st.floats(0, 3), st.integers(1, 4), st.integers(1, 4))
def test_a_steady_load_comes_to_rest(prompts: float, answers: float, prefill: int, decode: int) -> None:
    """Whoever flips is not wanted back: no more flips than there are workers, all in one direction."""
    ran = Ran(prefill, decode)
    for _ in range(600):
        ran.look(prompts, answers)
    assert len(ran.flips) < prefill + decode
    assert len({flip.role for _, flip in ran.flips}) <= 1
    assert all(at < 1400 for at, _ in ran.flips)


def test_workers_of_both_roles_and_a_mesh_of_one_kind_are_left_alone() -> None:
    both = [replace(one, role=Role.BOTH) for one in fleet([], [3.0, 3.0])]
    for states in (both, fleet([], [3.0, 0.0, 0.0]), fleet([3.0, 0.0], []), []):
        assert balance(states, Leaning(Role.PREFILL, 0.0), 1000.0, KNOBS)[0] is None
        assert balance(states, Leaning(Role.DECODE, 0.0), 1000.0, KNOBS)[0] is None
