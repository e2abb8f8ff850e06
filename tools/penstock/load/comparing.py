"""Two runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.load.table import number

Report = Mapping[str, Any]
_LOWER = {
    "time_to_first_token": ("p50", "p90", "p99"),
    "inter_token_latency": ("p50", "p90", "p99"),
    "inter_chunk_latency": ("p50", "p99"),
    "request_latency": ("p50", "p90", "p99"),
    "session_duration": ("p50", "p90"),
    "session_cost": ("avg",),
    "error_request_count": ("avg",),
    "load_schedule_delay_p99_ms": ("avg",),
}
"""Metrics of which less is better, and what of them is compared."""
_HIGHER = {
    "request_throughput": ("avg",),
    "output_token_throughput": ("avg",),
    "goodput": ("avg",),
    "good_request_fraction": ("avg",),
    "session_throughput": ("avg",),
    "overall_usage_prompt_cache_read_pct": ("avg",),
    "draft_acceptance_pct": ("avg",),
}
_SAME_LOAD = (
    *("trace", "mix", "speed", "rate", "limit", "turns", "duration", "max_think", "shrink", "context", "rounds"),
    *("tools", "ignore_eos", "slo_ttft", "slo_itl", "slo_latency"),
)
"""What two runs should have in common."""
_INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMetric:
    """One value of both runs; None is infinite."""

    name: str
    unit: str
    a: float | None
    b: float | None
    ratio: float | None
    """b : a; None where one of them is infinite or a is 0."""
    better: str
    """Which way is: `lower` or `higher`."""
    verdict: str
    """Of b: `better`, `worse` or `same`; `noise` where the rounds of both overlap. With a question mark where there are
    no rounds to tell."""


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Two reports."""

    metrics: tuple[ComparedMetric, ...]
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {"metrics": [asdict(metric) for metric in self.metrics], "notes": list(self.notes)}

    def shown(self, a: str, b: str) -> RenderableType:
        """For people; `a` and `b` are what they call the runs."""
        table = Table(title=f"A: {a}, B: {b}", title_justify="left")
        for column in ("metric", "A", "B", "B : A", "unit", "better is", "B is"):
            table.add_column(column, justify="right" if column in ("A", "B", "B : A") else "left", no_wrap=True)
        for one in self.metrics:
            ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
            table.add_row(one.name, number(one.a), number(one.b), ratio, one.unit, one.better, one.verdict)
        return Group(table, *map(Text, self.notes))


def compared(a: Report, b: Report) -> ComparedRuns:
    """What both have."""
    rounds = bool(a.get("rounds") and b.get("rounds"))
    return ComparedRuns(tuple(_metrics(a, b)), tuple(_notes(a, b, rounds=rounds)))


def _metrics(a: Report, b: Report) -> Iterator[ComparedMetric]:
    for better, metrics in (("lower", _LOWER), ("higher", _HIGHER)):
        for name, statistics in metrics.items():
            for at in statistics:
                if name in a and name in b:
                    yield _metric(a, b, (name, at), better)


def _metric(a: Report, b: Report, which: tuple[str, str], better: str) -> ComparedMetric:
    name, at = which
    one, two = a[name].get(at), b[name].get(at)
    return ComparedMetric(
        name=name if at == "avg" else f"{name} {at}",
        unit=a[name]["unit"],
        a=one,
        b=two,
        ratio=two / one if one and two is not None else None,
        better=better,
        verdict=_verdict(a, b, which, better),
    )


def _verdict(a: Report, b: Report, which: tuple[str, str], better: str) -> str:
    name, at = which
    one, two = _value(a[name], at), _value(b[name], at)
    if one == two:
        return "same"
    said = "better" if (two < one) == (better == "lower") else "worse"
    ours, theirs = _rounds(a, which), _rounds(b, which)
    if len(ours) < 2 or len(theirs) < 2:
        return f"{said}?"
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return said if apart else "noise"


def _rounds(report: Report, which: tuple[str, str]) -> list[float]:
    name, at = which
    return [_value(found[name], at) for found in report.get("rounds", ()) if name in found]


def _value(block: Mapping[str, Any], at: str) -> float:
    value = block.get(at)
    return _INFINITE if value is None else float(value)


def _notes(a: Report, b: Report, *, rounds: bool) -> Iterator[str]:
    ours, theirs = a.get("input_config", {}), b.get("input_config", {})
    if different := [name for name in _SAME_LOAD if ours.get(name) != theirs.get(name)]:
        said = ", ".join(f"{name} {ours.get(name)} and {theirs.get(name)}" for name in different)
        yield f"Not the same load: {said}."
    if not rounds:
        yield "One round each, so nobody knows what chance does: play both with --rounds 3 or more."
    for label, report in (("A", a), ("B", b)):
        if report.get("client_was_late"):
            yield f"In {label} the client was late, so a part of what was measured is its own."
