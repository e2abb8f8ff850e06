"""A report as one page of HTML that needs nothing else: its style and its plots are in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.load import charts
from penstock.load.charts import Chart, Curve, chart, cumulated, windowed
from penstock.load.distribution import percentiles
from penstock.load.records import LoadRecord
from penstock.load.table import AMOUNTS, LATENCIES, counts, number

_SHOWN = (50, 90, 95, 99)
_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
_COLUMNS = ("avg", "p50", "p90", "p95", "p99", "max")


def page(report: Mapping[str, Any], records: Sequence[LoadRecord]) -> str:
    """The page of a report and its requests."""
    over = [record for record in records if not record.cancelled]
    drawn = [_took(over), _steady(over), _over_time(over), _in_flight(over), _by_turn(report), _late(records)]
    return _TEMPLATES.get_template("page.html").render(
        report=report,
        counts=counts(report),
        columns=_COLUMNS,
        latencies=[
            (text, [number(report[name][column], report[name]["unit"]) for column in _COLUMNS], report[name]["unit"])
            for name, text in LATENCIES.items()
            if name in report
        ],
        amounts=[(text, number(report[name]["avg"])) for name, text in AMOUNTS.items() if name in report],
        tiers=[
            (tier, f"{found['tokens']:,}", f"{found['pct']:.1f}", found["pct"])
            for tier, found in report["cached_tokens_by_tier"].items()
        ],
        config=[(name, value) for name, value in report["input_config"].items() if value not in (None, "", [], ())],
        charts=[one for one in drawn if one is not None],
        box=charts,
    )


def _seconds(records: Sequence[LoadRecord], value: Callable[[LoadRecord], float | None]) -> list[float]:
    """Infinite for those that failed."""
    found = (value(record) if record.good else math.inf for record in records)
    return [one for one in found if one is not None]


def _distributed(named: Mapping[str, Sequence[float]], factor: float = 1.0) -> tuple[list[str], list[list[str]]]:
    """The table of cumulated curves: percentiles of each."""
    rows = []
    for name, values in named.items():
        if values:
            found = percentiles(np.array(values), _SHOWN) * factor
            rows.append([name, *(number(float(one) if math.isfinite(one) else None) for one in found)])
    return ["", *(f"p{at}" for at in _SHOWN)], rows


def _took(over: Sequence[LoadRecord]) -> Chart | None:
    named = {
        "TTFT": _seconds(over, lambda record: record.ttft),
        "E2E": _seconds(over, lambda record: record.latency),
    }
    return chart(
        "took",
        "How long requests took",
        "Part of the requests whose first token (TTFT), and whose last one (E2E), had come within a time, counted from"
        " when they were due. Requests that failed are never reached.",
        [Curve(name, cumulated(values)) for name, values in named.items()],
        axes=("seconds", "part of the requests"),
        table=_distributed(named),
        log_x=True,
        top=1.0,
    )


def _steady(over: Sequence[LoadRecord]) -> Chart | None:
    named = {
        "TPOT": [1e3 * one for one in _seconds(over, lambda record: record.tpot)],
        "ITL": [1e3 * gap for record in over for gap in record.gaps],
    }
    return chart(
        "steady",
        "How steadily tokens came",
        "Part of the answers by their mean time per token (TPOT), and of the gaps between parts of answers (ITL), that"
        " were not longer.",
        [Curve(name, cumulated(values)) for name, values in named.items()],
        axes=("milliseconds", "part"),
        table=_distributed(named),
        log_x=True,
        top=1.0,
    )


def _over_time(over: Sequence[LoadRecord]) -> Chart | None:
    points = [(record.scheduled, record.ttft) for record in over if record.good and record.ttft is not None]
    curves = [
        Curve(f"p{at}", windowed(points, lambda values, at=at: float(np.percentile(values, at))))  # type: ignore[misc]
        for at in (50, 99)
    ]
    rows = [
        [f"{at:.1f}", number(p50), number(p99)]
        for (at, p50), (_, p99) in zip(curves[0].points, curves[1].points, strict=True)
    ]
    return chart(
        "over-time",
        "TTFT over the run",
        "Seconds to the first token, by when requests were due; of those that were answered.",
        curves,
        axes=("seconds since the begin", "seconds"),
        table=(["due at, s", "p50, s", "p99, s"], rows),
    )


def _in_flight(over: Sequence[LoadRecord]) -> Chart | None:
    changes = sorted(change for record in over for change in ((record.scheduled, 1), (record.ended, -1)))
    now, points = 0, []
    for at, change in changes:
        points.append((at, float(now)))
        now += change
        points.append((at, float(now)))
    most = windowed(points, max)
    return chart(
        "in-flight",
        "Requests in flight",
        "Requests that were due and not yet over, all rounds together: the most in each part of the time.",
        [Curve("in flight", most)],
        axes=("seconds since the begin", "requests"),
        table=(["time, s", "requests"], [[f"{at:.1f}", f"{value:.0f}"] for at, value in most]),
    )


def _by_turn(report: Mapping[str, Any]) -> Chart | None:
    rows = [row for row in report["by_turn"] if row["time_to_first_token"] is not None]
    curves = [
        Curve(at, [(row["turn"], value) for row in rows if (value := row["time_to_first_token"][at]) is not None])
        for at in ("p50", "p99")
    ]
    cells = [
        [
            str(row["turn"]),
            *(number(row["time_to_first_token"][at]) for at in ("p50", "p99")),
            "" if row["cached_pct"] is None else f"{row['cached_pct']:.0f}",
        ]
        for row in rows
    ]
    return chart(
        "by-turn",
        "TTFT by turn",
        "Milliseconds to the first token of the nth turns of all agents.",
        curves,
        axes=("turn", "milliseconds"),
        table=(["turn", "p50, ms", "p99, ms", "cached, %"], cells),
    )


def _late(records: Sequence[LoadRecord]) -> Chart | None:
    values = [1e3 * (record.sent - record.scheduled) for record in records]
    return chart(
        "late",
        "How late the client was",
        "Part of the requests that were sent within a time after they were due.",
        [Curve("schedule delay", cumulated(values))],
        axes=("milliseconds", "part of the requests"),
        table=_distributed({"schedule delay": values}),
        log_x=True,
        top=1.0,
    )
