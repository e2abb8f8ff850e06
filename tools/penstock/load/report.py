"""A run as one JSON object in the form of AIPerf's summary (schema 1.5), and its requests one a line.

Readers of AIPerf take a field that is absent for one that does not apply. Here a number that is null beside them is
infinite, or can't be told because something failed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from typing import Any

from penstock.load.distribution import scalar
from penstock.load.metrics import (
    MetricTerms,
    by_tier,
    by_turn,
    client_was_late,
    metrics,
    metrics_of_lateness,
)
from penstock.load.planning import LoadPlan
from penstock.load.records import LoadRecord

SCHEMA = "1.5"
_MOST_ERRORS = 20
_SHORTER, _LONGER = 0.05, 0.1
"""Answers that are by such a part shorter, and prompts that are longer or shorter in the mean, are worth a word."""
_OF_A_ROUND = ("avg", "p50", "p90", "p99")
"""What is kept of each round of a run with several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """A run that is over."""

    plan: LoadPlan
    rounds: int
    """How often the plan was to be played."""
    records: Sequence[LoadRecord]
    terms: MetricTerms
    config: Mapping[str, Any]
    """What was asked for."""
    seed: str
    command: str
    began: float
    """Unix seconds, like those below."""
    ended: float
    round_began: Sequence[float]
    """When each round began."""
    cancelled: bool
    notes: Sequence[str] = ()
    """What its reader should know."""


def report(run: LoadRun) -> dict[str, Any]:
    """The whole run."""
    records, plan = run.records, run.plan
    id = uuid.uuid4().hex
    planned = sum(len(session.turns) for session in plan.sessions) * run.rounds
    counts = {
        "unsent_request_count": scalar(planned - len(records), "requests"),
        "skipped_request_count": scalar(plan.skipped_requests, "requests"),
        "cut_session_count": scalar(plan.cut_sessions, "sessions"),
    }
    return {
        "schema_version": SCHEMA,
        "penstock_version": metadata.version("penstock"),
        "benchmark_id": id,
        "start_time": _time(run.began),
        "end_time": _time(run.ended),
        "was_cancelled": run.cancelled,
        "input_config": dict(run.config),
        "run_info": {
            "benchmark_id": id,
            "random_seed": run.seed,
            "trial": 0,
            "run_label": plan.name,
            "variation_label": "base",
            "variation_index": 0,
            "variation_values": {},
            "cli_command": run.command,
        },
        **metrics(records, run.terms),
        **counts,
        "cached_tokens_by_tier": by_tier(records),
        "by_turn": by_turn(records) if plan.has_sessions else [],
        "rounds": _rounds(run),
        "error_summary": errors(records),
        "client_was_late": client_was_late(records),
        "notes": [*run.notes, *_lengths(records), *_lateness(records)],
    }


def errors(records: Iterable[LoadRecord]) -> list[dict[str, Any]]:
    """The kinds of failures, and how often each came; the most frequent ones."""
    kinds = sorted(
        ((record.error, record.status, record.message) for record in records if not record.good), key=lambda one: one
    )
    counted = [(len([*group]), kind) for kind, group in groupby(kinds)]
    return [
        {"error_details": {"code": status or None, "type": kind, "message": message}, "count": count}
        for count, (kind, status, message) in sorted(counted, key=lambda one: -one[0])[:_MOST_ERRORS]
    ]


def record_lines(run: LoadRun) -> Iterable[dict[str, Any]]:
    """Each request in the form of a line of AIPerf's profile_export.jsonl."""
    sessions = {session.name: number for number, session in enumerate(run.plan.sessions)}
    for record in sorted(run.records, key=lambda record: (record.round, record.scheduled)):
        yield _line(record, sessions[record.session], run.round_began[record.round])


def _line(record: LoadRecord, session: int, began: float) -> dict[str, Any]:
    values = {
        "time_to_first_token": (_ms(record.ttft), "ms"),
        "inter_token_latency": (_ms(record.tpot), "ms"),
        "inter_chunk_latency": ([_ms(gap) for gap in record.gaps] or None, "ms"),
        "request_latency": (_ms(record.latency), "ms"),
        "schedule_delay": (_ms(record.sent - record.scheduled), "ms"),
        "input_sequence_length": (record.prompt_tokens, "tokens"),
        "output_sequence_length": (record.tokens, "tokens"),
        "usage_prompt_cache_read_tokens": (record.cached_tokens, "tokens"),
    }
    found = {name: {"value": value, "unit": unit} for name, (value, unit) in values.items() if value is not None}
    if not record.good:
        found = {name: found[name] for name in ("schedule_delay",)}
    error = {"code": record.status or None, "type": record.error, "message": record.message}
    return {
        "metadata": {
            "session_num": session,
            "conversation_id": record.session,
            "turn_index": record.number - 1,
            "agent": record.agent,
            "round": record.round,
            "request_scheduled_ns": _ns(began + record.scheduled),
            "request_start_ns": _ns(began + record.sent),
            "request_end_ns": _ns(began + record.ended),
            "worker_id": f"process_{record.process}",
            "benchmark_phase": "profiling",
            "was_cancelled": record.cancelled,
            "refusals": record.refusals,
            "cached_tokens_by_tier": record.tiers,
        },
        "metrics": found,
        "error": None if record.good else error,
    }


def _rounds(run: LoadRun) -> list[dict[str, Any]]:
    """The metrics of each round, if there are several: how far they are apart is what chance does."""
    if run.rounds < 2:
        return []
    found = []
    for number in range(run.rounds):
        records = [record for record in run.records if record.round == number]
        if records:
            blocks = metrics(records, run.terms)
            found.append(
                {
                    name: {key: value for key, value in block.items() if key in _OF_A_ROUND}
                    for name, block in blocks.items()
                }
            )
    return found


def _lengths(records: Sequence[LoadRecord]) -> Iterator[str]:
    """Where prompts and answers were not as long as planned."""
    good = [record for record in records if record.good]
    if empty := sum(record.first is None for record in good):
        yield f"{empty} of {len(good)} answers were empty."
    short = sum(record.tokens < (1 - _SHORTER) * record.planned_output for record in good)
    if short > _SHORTER * len(good):
        yield f"{short} of {len(good)} answers were shorter than the trace's."
    counted = [record for record in good if record.prompt_tokens]
    if counted:
        ratio = sum(record.prompt_tokens or 0 for record in counted) / sum(r.planned_tokens for r in counted)
        if abs(ratio - 1) > _LONGER:
            yield f"Prompts had {ratio:.2f} times the tokens of the trace's."


def _lateness(records: Sequence[LoadRecord]) -> list[str]:
    found = metrics_of_lateness(records)
    if found is None:
        return []
    delay_ms, latency_ms = (1e3 * seconds for seconds in found)
    said = f"p99 of its schedule delay is {delay_ms:.1f} ms, the median latency {latency_ms:.0f} ms"
    if client_was_late(records):
        return [
            f"The client was late, so a part of what was measured is its own: {said}. Use more --processes, a lower"
            " --speed, or another machine."
        ]
    return [f"The client was in time: {said}."]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
