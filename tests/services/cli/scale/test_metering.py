"""What rates are made of: counts that begin anew, requests that wait, and buckets."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.cli.scale.judging import ITL, TTFT, Gathered, Judge, figures
from penstock.cli.scale.metering import LoadMeter, MeshCounts

from .seen import PACE


def counts(at: float, **other: Any) -> MeshCounts:
    figures: dict[str, Any] = dict.fromkeys(
        [
            *("arrived", "computed_tokens", "answer_tokens", "accepted_tokens", "queued_tokens"),
            *("begun", "held", "sequences", "kv_used"),
        ],
        0.0,
    )
    return MeshCounts(at=at, pace=PACE, workers=[], starting={}, **figures | other)


def test_what_waits_has_come_too() -> None:
    meter = LoadMeter()
    assert meter.look(counts(0)) is None
    seen = meter.look(counts(10, arrived=20, computed_tokens=6000, queued_tokens=2000))
    assert seen is not None
    assert (seen.requests_per_s, seen.prompt_tokens_per_s, seen.backlog_tokens) == (2.0, 800.0, 2000.0)
    later = meter.look(counts(20, arrived=30, computed_tokens=6000, queued_tokens=2000, held=10))
    assert later is not None
    assert later.prompt_tokens_per_s == pytest.approx(400.0), "those that the router holds back are like the others"
    assert later.backlog_tokens == pytest.approx(6000.0)
    assert (seen.computed_per_s, later.computed_per_s) == (600.0, 0.0)


def test_answers_are_expected_to_be_as_long_as_those_before() -> None:
    meter = LoadMeter()
    meter.look(counts(0))
    meter.look(counts(10, arrived=10, begun=10, answer_tokens=1000))
    seen = meter.look(counts(20, arrived=40, begun=40, answer_tokens=4000))
    assert seen is not None and seen.answer_tokens == pytest.approx(100.0)


def test_how_long_answers_are_is_said_by_those_that_have_ended() -> None:
    """Not by those that have come: of these nobody knows it yet."""
    meter = LoadMeter()
    meter.look(counts(0))
    seen = meter.look(counts(10, arrived=50, begun=40, sequences=30, answer_tokens=1000))
    assert seen is not None and (seen.ended_per_s, seen.answer_tokens, seen.generated_per_s) == (1.0, 100.0, 100.0)


def test_a_length_that_has_changed_is_known_after_some_hundred_requests() -> None:
    """However little time has passed."""
    meter = LoadMeter()
    meter.look(counts(0))
    tokens = 0
    for at in range(1, 21):
        tokens += 80 * (100 if at <= 10 else 8)
        seen = meter.look(counts(at, arrived=80 * at, begun=80 * at, answer_tokens=tokens))
    assert seen is not None and seen.answer_tokens < 16


def test_a_step_gives_as_many_tokens_as_late_ones_gave() -> None:
    meter = LoadMeter()
    meter.look(counts(0))
    seen = meter.look(counts(10, arrived=10, answer_tokens=1000, accepted_tokens=0))
    assert seen is not None and seen.pace.step_tokens == 1.0
    seen = meter.look(counts(610, arrived=20, answer_tokens=4000, accepted_tokens=2000))
    assert seen is not None and seen.pace.step_tokens == pytest.approx(3.0, abs=0.01), "what was long ago is forgotten"
    seen = meter.look(counts(620, arrived=20, answer_tokens=4000, accepted_tokens=2000))
    assert seen is not None and seen.pace.step_tokens == pytest.approx(3.0, abs=0.01), "without steps nothing is new"


def test_a_count_that_seems_to_shrink_is_no_load() -> None:
    """As that of requests which have come does, when one of those that were held back is refused."""
    meter = LoadMeter()
    meter.look(counts(0, arrived=100, held=10, computed_tokens=1e6))
    seen = meter.look(counts(10, arrived=90, computed_tokens=1e6))
    assert seen is not None and (seen.requests_per_s, seen.prompt_tokens_per_s) == (0.0, 0.0)


def test_the_counts_of_members_that_come_and_go_add_up() -> None:
    sums = Gathered()
    assert sums.add({"a": {"n": 1000.0}}) == {}
    assert sums.add({"a": {"n": 1010.0}, "b": {"n": 50.0}}) == {"n": 10.0}
    assert sums.add({"b": {"n": 55.0}}) == {"n": 15.0}
    assert sums.add({"a": {"n": 1011.0}, "b": {"n": 2.0}}) == {"n": 18.0}, "b was started again"


def test_who_has_been_gone_for_long_is_forgotten() -> None:
    sums = Gathered()
    sums.add({"gone": {"n": 1000.0}, "there": {"n": 0.0}})
    for _ in range(200):
        assert sums.add({"there": {"n": 0.0}}) == {"n": 0.0}
    assert sums.add({"gone": {"n": 1500.0}}) == {"n": 0.0}, "it begins with what it has"


class Gateway:
    """What a gateway's /metrics say, by the library that says it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = Histogram(TTFT, "-", ["model_name"], registry=self.registry, buckets=(0.5, 1.0, 2.0))
        Counter("penstock_other", "-", ["model_name"], registry=self.registry).labels("m").inc()

    def figures(self, model: str) -> dict[str, float]:
        return figures(generate_latest(self.registry).decode(), model)


def test_the_share_within_a_target_is_read_from_buckets_of_late() -> None:
    gateway, judge, sums = Gateway(), Judge(), Gathered()
    gateway.ttft.labels("m").observe(9.0)
    gateway.ttft.labels("other").observe(0.1)
    for at, seconds in ((0.0, ()), (50.0, (0.2, 0.2, 0.7, 1.5)), (100.0, (0.7, 0.7))):
        for one in seconds:
            gateway.ttft.labels("m").observe(one)
        judge.add(sums.add({"g": gateway.figures("m")}), at)
        if at == 50.0:
            assert judge.count(TTFT) == 4
            assert judge.met(TTFT, 1.0) == 0.75
            assert judge.met(TTFT, 1.5) == pytest.approx(0.875), "half of a bucket"
            assert judge.met(TTFT, 5.0) == 1.0
    assert judge.count(TTFT) == 2, "a minute ago is no more of late"
    assert judge.met(ITL, 0.1) == 1.0, "nothing is no miss"
