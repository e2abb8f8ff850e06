"""What happens corrects what is predicted."""

from __future__ import annotations

import pytest

from penstock.kv.spec import KvSpec
from penstock.router.bias import Bias, Watched
from penstock.router.config import RouterConfig
from penstock.router.planner import Planner
from penstock.router.plans import Happened, PlanAsk
from penstock.router.registry import Measured, Member
from penstock.router.workers import Role

SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="float32", block_size=16, block_bytes=4096)


class Truth:
    """A planner, and workers that say what they like and take what they take."""

    def __init__(self, **takes: float) -> None:
        self.now = 1000.0
        self.said: list[Happened] = []
        self.takes = takes
        """How many times as long as it says, by worker."""
        self.planner = Planner(RouterConfig(seed=1), lambda: self.now, self.said.append)
        for name in takes:
            member = Member(
                id=name,
                role=Role.BOTH,
                address=f"{name}:1",
                host_id="h",
                model="m",
                spec=SPEC,
                max_model_len=32_768,
                max_running=32,
                kv_capacity_tokens=200_000,
            )
            seat = self.planner.registry.join(member, self.now)
            seat.measure(Measured(1000.0, 1e9, 1e9, 0.02, 1e-9, 1e-12), self.now)

    def serve(self) -> str:
        """One request from beginning to end; who served it."""
        planned = self.planner.plan(PlanAsk(model="m", prompt_tokens=1000, max_tokens=100))
        name, number = planned.decode.id, planned.number
        seat = self.planner.registry.get(name)
        assert seat is not None
        seat.heard_at = self.now
        self.now += self.takes[name] * 1.0
        self.planner.prefilled(number)
        self.planner.generated(number, 1)
        self.now += self.takes[name] * 0.02 * 99
        self.planner.generated(number, 100)
        self.planner.release(number)
        for seat in self.planner.registry:
            seat.hear(seat.report, self.now)
        return name

    def last(self, what: str) -> Happened:
        return next(said for said in reversed(self.said) if said.what == what)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_predictions_come_right(factor: float) -> None:
    truth = Truth(a=factor)
    for _ in range(80):
        truth.serve()
    for what in ("first_token", "token"):
        assert truth.last(what).ratio == pytest.approx(1.0, abs=0.1)
        assert truth.last(what).bias == pytest.approx(factor, rel=0.15)


def test_who_is_slower_than_it_says_gets_less() -> None:
    truth = Truth(a=2.0, b=1.0)
    for _ in range(40):
        truth.serve()
    assert [truth.serve() for _ in range(10)] == ["b"] * 10


def test_what_was_learned_is_forgotten() -> None:
    bias = Bias()
    for _ in range(100):
        bias.learn(5.0, 1.0, now=0.0)
    assert bias.believed(0.0) == pytest.approx(4.0, rel=0.01), "and has a bound"
    assert bias.believed(300.0) == pytest.approx(2.0, rel=0.01)
    assert bias.believed(30_000.0) == pytest.approx(1.0)


@pytest.mark.parametrize("takes", [0.5, 1.5, 3.0])
def test_plans_that_were_made_before_it_was_learned_do_not_make_it_swing(takes: float) -> None:
    """A hundred are on their way at any time, and each ends with what was believed when it was made."""
    bias, beliefs = Bias(), [1.0] * 100
    for number in range(1000):
        now = number / 10
        beliefs.append(bias.believed(now))
        bias.learn(takes / beliefs[number], beliefs[number], now)
        assert min(1.0, takes) <= bias.value <= max(1.0, takes) + 1e-9
    assert bias.value == pytest.approx(takes, rel=0.05)


def test_little_says_nothing() -> None:
    watched = Watched(made_at=0.0, first_token_s=0.001, handoff_s=0.0, token_s=0.01)
    assert watched.saw(1, now=5.0) is None, "no prompt to speak of"
    watched.saw(7, now=9.0)
    assert watched.ended() is None
    watched.saw(11, now=10.0)
    assert watched.ended() == pytest.approx(0.5 / 0.01)
    assert Watched(0.0, 1.0, handoff_s=0.0, token_s=0.01).ended() is None, "no token at all"


def test_a_hand_off_is_no_part_of_the_first_token_nor_of_what_each_takes() -> None:
    watched = Watched(made_at=0.0, first_token_s=2.0, handoff_s=0.3, token_s=0.01)
    assert watched.saw(1, now=2.0) == pytest.approx(1.0)
    watched.saw(21, now=2.0 + 0.3 + 20 * 0.01)
    assert watched.ended() == pytest.approx(1.0)
