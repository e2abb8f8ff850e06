"""From requests to the metrics of a run. All latencies count from when a request was due, not from when it was sent,
and those of requests that failed are infinite. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.gateway.accounts.terms import Price
from penstock.load.distribution import Block, scalar, spread
from penstock.load.records import LoadRecord

_HOUR_S = 3600.0
_LATE = 0.01
"""Of the median latency: if the client sends later than that, in 99 % of its requests, it was part of what was
measured."""
_UNNAMED_TIER = "worker"
"""The tier of cached tokens of servers that don't name it: they have them in their own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSlo:
    """What makes a request a good one, in seconds; 0: anything."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    """Per token after the first, in the mean of the answer."""
    latency_s: float = 0.0
    """Of the whole answer."""

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.ttft_s or self.itl_s or self.latency_s)

    def met(self, record: LoadRecord) -> bool:
        """Whether a request was answered as it should be."""
        return record.good and all(
            not most or value is None or value <= most
            for most, value in (
                (self.ttft_s, record.ttft),
                (self.itl_s, record.tpot),
                (self.latency_s, record.latency),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTerms:
    """What metrics depend on beside the requests."""

    turns: Mapping[str, int]
    """Planned requests of each session."""
    begins: Mapping[str, float]
    """When each session begins, in seconds since the begin of its round."""
    has_sessions: bool
    slo: LoadSlo = LoadSlo()
    price: Price | None = None
    """None: costs are those that the server tells."""
    currency: str = ""


def metrics(records: Sequence[LoadRecord], terms: MetricTerms) -> dict[str, Block]:
    """All metrics that the requests have, by AIPerf's names where it has one."""
    over = [record for record in records if not record.cancelled]
    good = [record for record in over if record.good]
    seconds = duration_s(records)
    found = _latencies(over) | _lateness(records, over) | _amounts(records, over, good, seconds) | _cached(good)
    if terms.slo.any:
        met = sum(map(terms.slo.met, over))
        found |= {
            "good_request_count": scalar(met, "requests"),
            "good_request_fraction": scalar(met / max(1, len(over)), "ratio"),
            "goodput": scalar(met / seconds if seconds else 0.0, "requests/sec"),
        }
    if terms.has_sessions:
        found |= _sessions(records, terms, seconds)
    found |= _costs(good, terms)
    return {name: block for name, block in found.items() if block is not None}


def duration_s(records: Sequence[LoadRecord]) -> float:
    """From when the first request was due until the last one was over, of all rounds together."""
    rounds = defaultdict(list)
    for record in records:
        rounds[record.round].append(record)
    return sum(
        max(record.ended for record in each) - min(record.scheduled for record in each) for each in rounds.values()
    )


def client_was_late(records: Sequence[LoadRecord]) -> bool:
    """Whether the client was a bottleneck itself."""
    found = metrics_of_lateness(records)
    return found is not None and found[0] > _LATE * found[1]


def metrics_of_lateness(records: Sequence[LoadRecord]) -> tuple[float, float] | None:
    """p99 of the schedule delay, and the median latency of what was answered, in seconds; None without answers."""
    delays = spread((record.sent - record.scheduled for record in records), "sec")
    latencies = spread((record.latency for record in records if record.good), "sec")
    return None if delays is None or latencies is None else (delays["p99"], latencies["p50"])


def by_turn(records: Sequence[LoadRecord]) -> list[dict[str, Any]]:
    """TTFT, gaps and reuse of the requests that were the nth of their agent."""
    over = sorted((record for record in records if not record.cancelled), key=lambda record: record.number)
    rows = []
    for number, group in groupby(over, key=lambda record: record.number):
        each = [*group]
        good = [record for record in each if record.good]
        prompt = sum(record.prompt_tokens or 0 for record in good)
        cached = sum(record.cached_tokens or 0 for record in good)
        rows.append(
            {
                "turn": number,
                "requests": len(each),
                "prompt_tokens": prompt / len(good) if good else None,
                "cached_pct": 100 * cached / prompt if prompt else None,
                "time_to_first_token": spread(_of(each, lambda record: record.ttft), "ms"),
                "inter_chunk_latency": spread((1e3 * gap for record in each for gap in record.gaps), "ms"),
            }
        )
    return rows


def by_tier(records: Sequence[LoadRecord]) -> dict[str, dict[str, float]]:
    """Cached tokens of the answered requests by the tier that they came from, and their part of all prompt tokens."""
    prompt = sum(record.prompt_tokens or 0 for record in records if record.good)
    tokens: Counter[str] = Counter()
    for record in records:
        if record.good:
            tokens.update(tiers(record))
    return {tier: {"tokens": count, "pct": 100 * count / max(1, prompt)} for tier, count in tokens.items()}


def tiers(record: LoadRecord) -> Mapping[str, int]:
    """Cached tokens by tier; those of a server that names none are all in one."""
    if record.tiers is not None:
        return record.tiers
    return {_UNNAMED_TIER: record.cached_tokens} if record.cached_tokens else {}


def _of(records: Iterable[LoadRecord], value: Callable[[LoadRecord], float | None]) -> list[float]:
    """Milliseconds; infinite for those that failed, and nothing for those that have no such value."""
    found = (value(record) if record.good else math.inf for record in records)
    return [1e3 * seconds for seconds in found if seconds is not None]


def _latencies(over: Sequence[LoadRecord]) -> dict[str, Block | None]:
    second = (1e3 * record.gaps[0] for record in over if record.good and record.gaps)
    return {
        "time_to_first_token": spread(_of(over, lambda record: record.ttft), "ms"),
        "time_to_second_token": spread(second, "ms"),
        "inter_token_latency": spread(_of(over, lambda record: record.tpot), "ms"),
        "inter_chunk_latency": spread((1e3 * gap for record in over for gap in record.gaps), "ms"),
        "inter_token_gap": spread((1e3 * gap for record in over for gap in record.token_gaps), "ms"),
        "request_latency": spread(_of(over, lambda record: record.latency), "ms"),
    }


def _lateness(records: Sequence[LoadRecord], over: Sequence[LoadRecord]) -> dict[str, Block | None]:
    delay = spread((1e3 * (record.sent - record.scheduled) for record in records), "ms")
    found: dict[str, Block | None] = {"schedule_delay": delay, "effective_concurrency": _at_once(over)}
    if delay is not None:
        found["load_schedule_delay_p99_ms"] = scalar(delay["p99"], "ms")
    return found


def _at_once(over: Sequence[LoadRecord]) -> Block | None:
    """Requests in flight, in the mean over the time, and at most. They are from when they are due."""
    if not over:
        return None
    seconds = duration_s(over)
    changes = sorted(
        change for record in over for change in ((record.round, record.scheduled, 1), (record.round, record.ended, -1))
    )
    now = most = 0
    for _, _, change in changes:
        now += change
        most = max(most, now)
    whole = sum(record.ended - record.scheduled for record in over)
    return {"unit": "requests", "avg": whole / seconds if seconds else 0.0, "max": most}


def _amounts(
    records: Sequence[LoadRecord], over: Sequence[LoadRecord], good: Sequence[LoadRecord], seconds: float
) -> dict[str, Block | None]:
    prompt = sum(record.prompt_tokens or 0 for record in good)
    output = sum(record.tokens for record in good)
    rate = 1 / seconds if seconds else 0.0
    speeds = (1 / record.tpot for record in good if record.tpot)
    return {
        "request_count": scalar(len(good), "requests"),
        "error_request_count": scalar(len(over) - len(good), "requests"),
        "cancelled_request_count": scalar(len(records) - len(over), "requests"),
        "benchmark_duration": scalar(seconds, "sec"),
        "request_throughput": scalar(len(good) * rate, "requests/sec"),
        "output_token_throughput": scalar(output * rate, "tokens/sec"),
        "total_token_throughput": scalar((prompt + output) * rate, "tokens/sec"),
        "output_token_throughput_per_user": spread(speeds, "tokens/sec/user"),
        "input_sequence_length": spread((r.prompt_tokens for r in good if r.prompt_tokens is not None), "tokens"),
        "output_sequence_length": spread((record.tokens for record in good), "tokens"),
        "total_isl": scalar(prompt, "tokens"),
        "total_osl": scalar(output, "tokens"),
    }


def _cached(good: Sequence[LoadRecord]) -> dict[str, Block | None]:
    counted = [record for record in good if record.prompt_tokens and record.cached_tokens is not None]
    found: dict[str, Block | None] = {}
    ideal = 100 * sum(record.reusable for record in good) / max(1, sum(record.planned_tokens for record in good))
    if good:
        found["theoretical_prefix_cache_hit"] = scalar(ideal, "%")
    if counted:
        prompt = sum(record.prompt_tokens or 0 for record in counted)
        cached = sum(record.cached_tokens or 0 for record in counted)
        found["total_usage_prompt_tokens"] = scalar(prompt, "tokens")
        found["total_usage_prompt_cache_read_tokens"] = scalar(cached, "tokens")
        found["overall_usage_prompt_cache_read_pct"] = scalar(100 * cached / prompt, "%")
    drafted = sum(record.drafted_tokens or 0 for record in good)
    if drafted:
        accepted = sum(record.accepted_tokens or 0 for record in good)
        found["drafted_tokens"] = scalar(drafted, "tokens")
        found["draft_acceptance_pct"] = scalar(100 * accepted / drafted, "%")
    return found


def _sessions(records: Sequence[LoadRecord], terms: MetricTerms, seconds: float) -> dict[str, Block | None]:
    """Jobs: sessions all of whose turns were answered. One with a failed turn has failed, and takes for ever; one that
    the end of the run cut short is neither."""
    done, failed, ran_s = [], 0, 0.0
    for (_, name), each in _by_session(records).items():
        lasted = max(record.ended for record in each) - terms.begins[name]
        if any(not record.good and not record.cancelled for record in each):
            failed += 1
        elif len(each) == terms.turns[name] and all(record.good for record in each):
            done.append(lasted)
        else:
            continue
        ran_s += lasted
    return {
        "session_count": scalar(len(done), "sessions"),
        "error_session_count": scalar(failed, "sessions"),
        "session_throughput": scalar(_HOUR_S * len(done) / seconds if seconds else 0.0, "sessions/hour"),
        "jobs_per_hour_per_user": scalar(_HOUR_S * len(done) / ran_s if ran_s else 0.0, "jobs/hour/user"),
        "session_duration": spread([*done, *[math.inf] * failed], "sec"),
    }


def _by_session(records: Iterable[LoadRecord]) -> dict[tuple[int, str], list[LoadRecord]]:
    found = defaultdict(list)
    for record in records:
        found[record.round, record.session].append(record)
    return found


def _costs(good: Sequence[LoadRecord], terms: MetricTerms) -> dict[str, Block | None]:
    """What answers cost, by session; requests without one are sessions of their own."""
    costs = defaultdict(list)
    for record in good:
        if (cost := _cost(record, terms.price)) is not None:
            costs[record.round, record.session].append(cost)
    if not costs:
        return {}
    sums = [sum(each) for each in costs.values()]
    unit = terms.currency or "USD"
    return {"session_cost": spread(sums, unit), "total_cost": scalar(sum(sums), unit)}


def _cost(record: LoadRecord, price: Price | None) -> float | None:
    if price is None:
        return record.cost
    if record.prompt_tokens is None:
        return None
    cached = tiers(record)
    return price.cost(record.prompt_tokens - sum(cached.values()), cached, record.tokens)
