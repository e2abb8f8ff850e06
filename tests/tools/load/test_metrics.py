"""From requests to metrics: by hand where that is short, and beside a naive reference where it is not."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tools.load.support import failed, record

from penstock.gateway.accounts.terms import Price
from penstock.load.distribution import percentiles, spread
from penstock.load.metrics import LoadSlo, MetricTerms, by_tier, by_turn, client_was_late, metrics
from penstock.load.records import CANCELLED

TERMS = MetricTerms(turns={"s": 1}, begins={"s": 0.0}, has_sessions=False)


def naive(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low if low == high else low + (high - low) * (place - math.floor(place))


@given(
    st.lists(st.one_of(st.floats(0, 1e6), st.just(math.inf)), min_size=1, max_size=60),
    st.sampled_from([1, 25, 50, 90, 99]),
)
def test_percentiles_with_infinite_values(values: list[float], percent: int) -> None:
    [found] = percentiles(np.array(values), [percent])
    assert found == pytest.approx(naive(values, percent))


def test_a_spread_has_what_readers_of_aiperf_know() -> None:
    values = [float(number) for number in range(1, 101)]
    found = spread(values, "ms")
    assert found is not None
    assert set(found) == {
        *("unit", "avg", "min", "max", "std", "count", "sum"),
        *(f"p{at}" for at in (1, 5, 10, 25, 50, 75, 90, 95, 99)),
    }
    assert (found["avg"], found["count"], found["sum"]) == (50.5, 100, 5050)
    assert found["std"] == pytest.approx(statistics.stdev(values))
    assert spread([], "ms") is None


def test_what_failed_has_infinite_latency() -> None:
    """Of 100 requests 2 failed: p99 is infinite, p90 is not; the mean can't be told."""
    found = metrics([record() for _ in range(98)] + [failed() for _ in range(2)], TERMS)
    for name in ("time_to_first_token", "request_latency", "inter_token_latency"):
        assert found[name]["p90"] is not None and found[name]["count"] == 100
        assert [found[name][at] for at in ("p99", "max", "avg", "std", "sum")] == [None] * 5
    assert found["time_to_first_token"]["p50"] == 1000.0
    assert found["inter_token_latency"]["p50"] == 500.0
    assert found["inter_chunk_latency"]["count"] == 98 * 4
    assert (found["request_count"]["avg"], found["error_request_count"]["avg"]) == (98, 2)


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = record(scheduled=0.25, sent=0.75)
    found = metrics([late], TERMS)
    assert found["time_to_first_token"]["p50"] == 750.0
    assert found["request_latency"]["p50"] == 2750.0
    assert found["schedule_delay"]["p99"] == found["load_schedule_delay_p99_ms"]["avg"] == 500.0
    assert client_was_late([late]) and not client_was_late([record(sent=0.01)])


def test_what_was_cancelled_is_neither_answered_nor_failed() -> None:
    found = metrics([record(), record(error=CANCELLED, first=None, last=None, gaps=[])], TERMS)
    counts = [found[f"{kind}request_count"]["avg"] for kind in ("", "error_", "cancelled_")]
    assert counts == [1, 0, 1]
    assert found["time_to_first_token"]["count"] == 1


def test_rates_are_over_the_time_of_all_rounds() -> None:
    found = metrics([record(), record(round=1, scheduled=1.0, ended=3.0)], TERMS)
    assert found["benchmark_duration"]["avg"] == 5.0
    assert found["request_throughput"]["avg"] == pytest.approx(2 / 5)
    assert found["output_token_throughput"]["avg"] == pytest.approx(10 / 5)
    assert found["total_token_throughput"]["avg"] == pytest.approx(210 / 5)
    assert found["effective_concurrency"]["max"] == 1


def test_requests_in_flight() -> None:
    found = metrics([record(), record(scheduled=1.0, ended=4.0), record(scheduled=2.0, ended=4.0)], TERMS)
    assert found["effective_concurrency"] == {"unit": "requests", "avg": (3 + 3 + 2) / 4, "max": 3}


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (LoadSlo(ttft_s=1.0), 3),
        (LoadSlo(ttft_s=0.9), 1),
        (LoadSlo(itl_s=0.5), 3),
        (LoadSlo(itl_s=0.4), 1),
        (LoadSlo(ttft_s=1.0, latency_s=2.9), 1),
    ],
)
def test_goodput_counts_what_met_all_of_it_and_no_failure(slo: LoadSlo, good: int) -> None:
    """Of four requests two are slow, one has a single token soon, which has no time per token, and one failed."""
    soon = record(first=0.5, last=0.5, gaps=[], output_tokens=1)
    terms = MetricTerms(turns={}, begins={}, has_sessions=False, slo=slo)
    found = metrics([record(), record(), soon, failed()], terms)
    assert found["good_request_count"]["avg"] == good
    assert found["good_request_fraction"]["avg"] == good / 4
    assert found["goodput"]["avg"] == pytest.approx(good / 3.0)


def test_jobs_are_sessions_all_of_whose_turns_were_answered() -> None:
    """One ends after 3 s and one after 7 s, one has a failed turn, and of one the second turn was not sent."""
    turn = {"turn": 1, "number": 2, "scheduled": 4.0, "sent": 4.0, "first": 5.0, "last": 7.0, "ended": 7.0}
    records = [
        record(session="one"),
        record(session="two"),
        record(session="two", **turn),
        record(session="three"),
        failed(session="three", turn=1, number=2, scheduled=4.0, sent=4.0, ended=6.0),
        record(session="four"),
    ]
    turns = {"one": 1, "two": 2, "three": 2, "four": 2}
    found = metrics(records, MetricTerms(turns=turns, begins=dict.fromkeys(turns, 0.0), has_sessions=True))
    assert (found["session_count"]["avg"], found["error_session_count"]["avg"]) == (2, 1)
    assert found["session_throughput"]["avg"] == pytest.approx(2 / 7 * 3600)
    assert found["jobs_per_hour_per_user"]["avg"] == pytest.approx(2 / (3 + 7 + 6) * 3600)
    assert [found["session_duration"][at] for at in ("count", "min", "p50", "max")] == [3, 3.0, 7.0, None]


def test_hits_by_tier_and_beside_a_cache_without_end() -> None:
    records = [
        record(cached_tokens=60, tiers={"worker": 50, "host": 10, "nvme": 0}),
        record(cached_tokens=20),
        failed(cached_tokens=None),
    ]
    assert by_tier(records) == {
        "worker": {"tokens": 70, "pct": 35.0},
        "host": {"tokens": 10, "pct": 5.0},
        "nvme": {"tokens": 0, "pct": 0.0},
    }
    found = metrics(records, TERMS)
    assert found["overall_usage_prompt_cache_read_pct"]["avg"] == 40.0
    assert found["theoretical_prefix_cache_hit"]["avg"] == 50.0
    assert "overall_usage_prompt_cache_read_pct" not in metrics([record()], TERMS), "who says nothing has no hits of 0"


def test_costs_by_the_prices_and_by_the_server() -> None:
    price = Price(input=10.0, output=100.0, cached={"host": 1.0})
    records = [
        record(cached_tokens=60, tiers={"host": 60}),
        record(turn=1, cached_tokens=60, tiers={"host": 60}),
        record(session="t", cost=7.0),
    ]
    priced = metrics(records, MetricTerms(turns={}, begins={}, has_sessions=False, price=price, currency="EUR"))
    one = (40 * 10 + 60 * 1 + 5 * 100) / 1e6
    assert priced["session_cost"]["unit"] == "EUR"
    assert (priced["session_cost"]["min"], priced["session_cost"]["max"]) == pytest.approx((0.0015, 2 * one))
    told = metrics(records, TERMS)
    assert told["session_cost"]["count"] == 1 and told["total_cost"]["avg"] == 7.0
    assert "session_cost" not in metrics([record()], TERMS)


def test_drafts_where_the_server_tells_of_them() -> None:
    assert metrics([record(drafted_tokens=8, accepted_tokens=6)], TERMS)["draft_acceptance_pct"]["avg"] == 75.0
    assert "draft_acceptance_pct" not in metrics([record()], TERMS)


def test_by_turn() -> None:
    records = [
        record(cached_tokens=0),
        record(turn=1, number=2, cached_tokens=80),
        failed(turn=1, number=2),
        record(turn=2, agent=1, number=1, cached_tokens=50, first=2.0),
    ]
    first, second = by_turn(records)
    assert (first["turn"], first["requests"], first["cached_pct"]) == (1, 2, 25.0)
    assert (first["time_to_first_token"]["min"], first["time_to_first_token"]["max"]) == (1000.0, 2000.0)
    assert (second["requests"], second["cached_pct"], second["time_to_first_token"]["max"]) == (2, 80.0, None)


def test_tokens_of_a_part_have_no_gap_between_them() -> None:
    several = record(sizes=[2, 1, 3, 1, 1], output_tokens=None)
    assert several.token_gaps == [0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5] and several.tokens == 8
    assert several.tpot == pytest.approx(2.0 / 7)
    assert record().token_gaps == [], "a server that does not say how many tokens a part has"
