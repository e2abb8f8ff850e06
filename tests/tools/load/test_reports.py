"""The report as JSON, as requests one a line, for the terminal and as a page; and two of them side by side."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.tools.load.support import chain, failed, plan, record

from penstock.load.charts import Axis, Curve, chart, cumulated, windowed
from penstock.load.comparing import compared
from penstock.load.metrics import LoadSlo, MetricTerms
from penstock.load.page import page
from penstock.load.records import CANCELLED, LoadRecord
from penstock.load.report import LoadRun, record_lines, report
from penstock.load.table import shown


def run(*records: LoadRecord, rounds: int = 1, **more: Any) -> LoadRun:
    """Of two sessions of two turns each."""
    found = plan(*chain("s", (1.0, 2), (1.0, 3)), *chain("t", (1.0, 2), (1.0, 3)))
    terms = MetricTerms(turns={"s": 2, "t": 2}, begins={"s": 0.0, "t": 0.0}, has_sessions=True, slo=LoadSlo(ttft_s=1.5))
    fields: dict[str, Any] = {
        "plan": found, "rounds": rounds, "records": records, "terms": terms, "seed": "x",
        "config": {"url": "http://x/v1", "model": "<m>", "trace": "t", "speed": 1.0},
        "command": "penstock load t", "began": 1000.0, "ended": 1010.0, "round_began": [1000.0] * rounds,
        "cancelled": False,
    }  # fmt: skip
    return LoadRun(**fields | more)


def second(**fields: Any) -> LoadRecord:
    later = {"turn": 1, "number": 2, "scheduled": 4.0, "sent": 4.0, "first": 4.5, "last": 6.5, "ended": 6.5}
    return record(**{**later, **fields})


WHOLE = run(
    record(cached_tokens=20, tiers={"worker": 15, "host": 5}),
    second(cached_tokens=80, tiers={"worker": 80}),
    record(session="t", cached_tokens=0, tiers={}),
    failed(session="t", turn=1, number=2, scheduled=4.0, sent=4.0, ended=5.0, agent=0),
    notes=("A note.",),
)


def parsed(run: LoadRun) -> dict[str, Any]:
    """As whoever reads the file has it."""
    return json.loads(msgspec.json.encode(report(run)))


def test_the_fields_that_readers_of_aiperf_know() -> None:
    found = parsed(WHOLE)
    assert found["schema_version"] == "1.5" and found["was_cancelled"] is False
    assert (found["start_time"], found["end_time"]) == ("1970-01-01T00:16:40+00:00", "1970-01-01T00:16:50+00:00")
    assert found["run_info"]["benchmark_id"] == found["benchmark_id"]
    assert (found["run_info"]["random_seed"], found["run_info"]["cli_command"]) == ("x", "penstock load t")
    assert found["input_config"]["model"] == "<m>"
    for name in ("time_to_first_token", "inter_token_latency", "request_latency", "schedule_delay", "session_duration"):
        assert {"unit", "avg", "min", "max", "std", "p50", "p90", "p95", "p99", "count"} <= set(found[name])
    for name in (
        *("request_throughput", "output_token_throughput", "request_count", "error_request_count"),
        *("good_request_count", "goodput", "session_throughput", "load_schedule_delay_p99_ms"),
    ):
        assert set(found[name]) == {"unit", "avg"}
    assert found["time_to_first_token"]["p50"] == 1000.0 and found["time_to_first_token"]["max"] is None
    assert found["error_summary"] == [{"error_details": {"code": 500, "type": "Refused", "message": "no"}, "count": 1}]
    assert found["cached_tokens_by_tier"]["worker"] == {"tokens": 95, "pct": pytest.approx(95 / 3)}
    assert [row["turn"] for row in found["by_turn"]] == [1, 2]


def test_what_was_not_sent_is_counted() -> None:
    found = parsed(run(record(), record(session="t", error=CANCELLED), cancelled=True))
    assert (found["unsent_request_count"]["avg"], found["cancelled_request_count"]["avg"]) == (2, 1)
    assert found["was_cancelled"] is True


def test_whether_the_client_was_the_bottleneck_is_said_in_words() -> None:
    in_time, late = parsed(run(record())), parsed(run(record(sent=0.5)))
    assert in_time["client_was_late"] is False and "The client was in time" in in_time["notes"][-1]
    assert late["client_was_late"] is True and "The client was late" in late["notes"][-1]
    assert "500.0 ms" in late["notes"][-1] and "--processes" in late["notes"][-1]


def test_lengths_that_are_not_those_of_the_trace_are_said() -> None:
    assert not any("answers" in note or "Prompts" in note for note in parsed(run(record(planned_output=5)))["notes"])
    empty = record(session="t", first=None, last=None, gaps=[], output_tokens=0, planned_output=5, prompt_tokens=150)
    notes = parsed(run(record(planned_output=5), empty))["notes"]
    assert "1 of 2 answers were empty." in notes and "1 of 2 answers were shorter than the trace's." in notes
    assert "Prompts had 1.25 times the tokens of the trace's." in notes


def test_nothing_at_all_is_a_report_too() -> None:
    nothing = run()
    found = parsed(nothing)
    assert found["request_count"]["avg"] == 0 and found["client_was_late"] is False
    assert "request_latency" not in found
    Console(file=io.StringIO()).print(shown(found))
    assert "<svg" not in page(found, ())


def test_requests_one_a_line_as_aiperf_has_them() -> None:
    lines = [*record_lines(WHOLE)]
    assert len(lines) == 4
    first, last = lines[0], next(line for line in lines if line["error"])
    assert first["metadata"]["request_scheduled_ns"] == first["metadata"]["request_start_ns"] == 1_000 * 10**9
    assert (first["metadata"]["conversation_id"], first["metadata"]["turn_index"]) == ("s", 0)
    assert first["metrics"]["time_to_first_token"] == {"value": 1000.0, "unit": "ms"}
    assert first["metrics"]["inter_chunk_latency"]["value"] == [500.0] * 4
    assert first["error"] is None
    assert last["error"] == {"code": 500, "type": "Refused", "message": "no"}
    assert set(last["metrics"]) == {"schedule_delay"}


def test_the_terminal_shows_what_matters() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(shown(parsed(WHOLE)))
    text = console.export_text()
    for what in ("TTFT", "TPOT", "ITL", "E2E", "∞", "jobs/hour", "goodput", "cached in worker", "3 answered, 1 failed"):
        assert what in text
    assert "A note." in text and "1 x Refused: no" in text


class Checked(HTMLParser):
    """Balanced elements, their ids, and what they refer to."""

    VOID = frozenset({"meta", "line", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "aria-labelledby":
                self.labels += (value or "").split()
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "style") and name != "style":
                self.outside.append(f"{name}={value}")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(parsed(WHOLE), WHOLE.records)
    checked = Checked()
    checked.feed(text)
    assert checked.open == [] and checked.outside == []
    assert not re.search(r"url\(|@import|https?://(?!x/v1)|<script|<link|<iframe", text)
    assert checked.tags["html"] == checked.tags["main"] == 1
    assert len(checked.ids) == len(set(checked.ids)) and set(checked.labels) == set(checked.ids)
    charts = checked.tags["svg"]
    assert charts == text.count('role="img"') == text.count("<desc") >= 5
    assert checked.tags["figcaption"] == charts and checked.tags["details"] == charts + 1, "each plot has its numbers"
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text
    assert "&lt;m&gt;" in text and "<m>" not in text, "what a server says is text"


def test_curves_end_below_one_where_something_failed() -> None:
    points = cumulated([1.0, 2.0, float("inf"), float("inf")])
    drawn = chart("id", "t", "a", [Curve("c", points)], axes=("x", "y"), table=((), ()), log_x=True, top=1.0)
    assert drawn is not None and drawn.curves[0].points == [(1.0, 0.25), (2.0, 0.5)]
    assert len(cumulated(range(10_000))) == 200
    assert chart("id", "t", "a", [Curve("c", ())], axes=("x", "y"), table=((), ())) is None


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (Axis("x", 0.0, 1.0, 0, 100), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis("x", 0.05, 0.2, 0, 100, log=True), ["0.05", "0.1", "0.2"]),
        (Axis("x", 0.01, 1000.0, 0, 100, log=True), ["0.01", "0.1", "1", "10", "100", "1000"]),
        (Axis("x", 3.0, 47.0, 0, 100), ["10", "20", "30", "40"]),
    ],
)
def test_ticks_are_round(axis: Axis, texts: list[str]) -> None:
    assert [tick.text for tick in axis.ticks] == texts
    places = [tick.at for tick in axis.ticks]
    assert places == sorted(places) and all(0 <= at <= 100 for at in places)


def test_windows_of_time() -> None:
    points = [(0.0, 1.0), (0.1, 3.0), (10.0, 7.0)]
    assert windowed(points, max, windows=10) == [(0.5, 3.0), (9.5, 7.0)]
    assert windowed([], max) == []


def rounds(*first_s: float, **config: Any) -> dict[str, Any]:
    """A run with a round for each time to the first token."""
    records = [record(round=number, first=first) for number, first in enumerate(first_s)]
    made = run(*records, rounds=len(first_s))
    return parsed(made) | {"input_config": {"trace": "t", **config}}


def test_what_is_within_the_noise_of_rounds_is_said_to_be() -> None:
    base = rounds(1.0, 1.2, 1.1)
    found = {metric.name: metric for metric in compared(base, rounds(1.05, 1.3, 1.15)).metrics}
    assert found["time_to_first_token p50"].verdict == "noise"
    found = {metric.name: metric for metric in compared(base, rounds(0.5, 0.6, 0.55)).metrics}
    assert found["time_to_first_token p50"].verdict == "better"
    assert found["time_to_first_token p50"].ratio == pytest.approx(0.5)
    found = {metric.name: metric for metric in compared(base, rounds(1.5, 1.6, 1.55)).metrics}
    assert found["time_to_first_token p50"].verdict == "worse"
    assert found["error_request_count"].verdict == "same"


def test_one_round_leaves_a_question_mark() -> None:
    found = compared(rounds(1.0), rounds(0.5))
    assert {metric.name: metric for metric in found.metrics}["time_to_first_token p50"].verdict == "better?"
    assert any("--rounds" in note for note in found.notes)


def test_infinite_is_worse_than_any_number() -> None:
    found = compared(parsed(run(record())), parsed(run(record(), failed(session="t"))))
    latency = {metric.name: metric for metric in found.metrics}["request_latency p99"]
    assert (latency.b, latency.ratio, latency.verdict) == (None, None, "worse?")
    assert json.loads(msgspec.json.encode(found.json()))["metrics"]


def test_another_load_is_named() -> None:
    found = compared(rounds(1.0, speed=1.0), rounds(1.0, speed=2.0))
    assert "Not the same load: speed 1.0 and 2.0." in found.notes
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found.shown("a.json", "b.json"))
    assert "A: a.json, B: b.json" in console.export_text()
