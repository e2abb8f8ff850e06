"""A report for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.load.distribution import Block

Report = Mapping[str, Any]
LATENCIES = {
    "time_to_first_token": "TTFT",
    "inter_token_latency": "TPOT",
    "inter_chunk_latency": "ITL",
    "request_latency": "E2E",
    "session_duration": "job",
    "schedule_delay": "schedule delay",
}
"""Metrics by name, and what people call them."""
AMOUNTS = {
    "request_throughput": "requests/s",
    "output_token_throughput": "output tokens/s",
    "goodput": "goodput, requests/s",
    "good_request_fraction": "good, part of the requests",
    "session_throughput": "jobs/hour",
    "jobs_per_hour_per_user": "jobs/hour of a user",
    "overall_usage_prompt_cache_read_pct": "prompt tokens cached, %",
    "theoretical_prefix_cache_hit": "of a cache without end, %",
    "draft_acceptance_pct": "drafts accepted, %",
    "total_cost": "cost",
    "effective_concurrency": "requests in flight",
}
_COLUMNS = ("avg", "p50", "p90", "p95", "p99", "max")


def shown(report: Report) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [_latencies(report), _amounts(report)]
    if report.get("by_turn"):
        parts.append(_turns(report["by_turn"]))
    said = [
        f"{each['count']} x {each['error_details']['type']}: {each['error_details']['message']}"
        for each in report["error_summary"]
    ]
    return Group(*parts, *map(Text, (*report["notes"], *said)))


def counts(report: Report) -> str:
    """One line: how many requests, and what became of them."""
    names = {
        "request_count": "answered",
        "error_request_count": "failed",
        "cancelled_request_count": "cancelled",
        "unsent_request_count": "not sent",
        "skipped_request_count": "too long",
    }
    found = {text: report[name]["avg"] for name, text in names.items() if name in report}
    said = ", ".join(f"{count:.0f} {text}" for text, count in found.items() if count or text == "answered")
    return f"{said} in {report['benchmark_duration']['avg']:.1f} s"


def number(value: float | None, unit: str = "") -> str:
    """A value as people read it; one that is null is infinite."""
    if value is None:
        return "∞"
    if unit == "ms" and value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _latencies(report: Report) -> Table:
    table = Table(title=counts(report), title_justify="left")
    table.add_column("from when it was due", no_wrap=True)
    for column in (*_COLUMNS, "unit"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for name, text in LATENCIES.items():
        block: Block | None = report.get(name)
        if block is not None:
            cells = (number(block[column], block["unit"]) for column in _COLUMNS)
            table.add_row(text, *cells, block["unit"])
    return table


def _amounts(report: Report) -> Table:
    table = Table("figure", "value")
    for name, text in AMOUNTS.items():
        if name in report:
            table.add_row(text, number(report[name]["avg"]))
    for tier, found in report["cached_tokens_by_tier"].items():
        if found["tokens"]:
            table.add_row(f"cached in {tier}, %", number(found["pct"]))
    if "session_cost" in report:
        block = report["session_cost"]
        table.add_row(f"cost per session, {block['unit']}", number(block["avg"]))
    return table


def _turns(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("turn", "requests", "prompt", "cached", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"):
        table.add_column(column, justify="right")
    for row in rows:
        blocks = (row["time_to_first_token"], row["inter_chunk_latency"])
        cells = [number(block[at]) if block else "" for block in blocks for at in ("p50", "p99")]
        prompt = "" if row["prompt_tokens"] is None else f"{row['prompt_tokens']:.0f}"
        cached = "" if row["cached_pct"] is None else f"{row['cached_pct']:.0f} %"
        table.add_row(str(row["turn"]), str(row["requests"]), prompt, cached, *cells)
    return table
