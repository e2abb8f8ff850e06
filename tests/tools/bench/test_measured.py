"""docs/measured.md holds what the kept results say, and says so where a goal is missed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.bench.harness import BenchReport, figure, missing
from penstock.bench.measured.document import document, section, wrapped
from penstock.bench.measured.results import Results, table

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "loadtest" / "results"
KEPT = sorted(path for path in RESULTS.rglob("*.json"))


def results(*figures) -> Results:
    return Results(json.loads(BenchReport("overhead", figures).json()))


def test_the_committed_document_is_what_the_results_say():
    assert (ROOT / "docs/measured.md").read_text() == document(RESULTS), "run `make measured`"


def test_every_goal_of_the_kept_runs_is_in_the_document():
    """Missed or met, with its median: none is left out because it looks bad."""
    text = document(RESULTS)
    for path in RESULTS.glob("*.json"):
        kept = Results(json.loads(path.read_text()))
        for each in kept.data.get("figures", ()):
            if each["goal"] is not None and not each["id"].startswith("seconds_saved"):
                rows = (f"| {kept.number(each['id'], d)} | {kept.span(each['id'], d)} " for d in range(4))
                assert any(row in text for row in rows), each["id"]
    assert text.count("missed") >= 3


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_run_alone_has_a_section(path):
    text = section(path.read_text())
    assert text.startswith("## ") and "None" not in text


def test_parts_of_a_run_are_read_together(tmp_path):
    for name, id, value in (("overhead", "a", 1.0), ("overhead.b", "b", 2.0)):
        report = BenchReport("overhead", [figure(id, [value], "ratio", "x")])
        (tmp_path / f"{name}.json").write_text(report.json())
    whole = Results.read(tmp_path / "overhead.json")
    assert (whole.value("a"), whole.value("b")) == (1.0, 2.0)
    part = json.loads((tmp_path / "overhead.b.json").read_text())
    part["host"]["cpu"] = "another"
    (tmp_path / "overhead.b.json").write_text(json.dumps(part))
    with pytest.raises(ValueError, match="another"):
        Results.read(tmp_path / "overhead.json")
    apart = Results.read(tmp_path / "overhead.json", apart="")
    assert apart.value("b") == 2.0 and apart.elsewhere("a") == ""
    assert f"This part was measured on {part['host']['cores']} cores, another" in apart.elsewhere("b")
    simulated = BenchReport("overhead", [figure("b", [3.0], "ratio", "x")], simulated=True)
    (tmp_path / "overhead.b.json").write_text(simulated.json())
    whole = Results.read(tmp_path / "overhead.json")
    assert whole.value("b") == 3.0 and "cores" in whole.machine, "a simulation says nothing of the machine"


def test_the_forms_of_large_models_have_a_table_where_they_were_measured():
    form = figure("deepseek_verify3_4k_vs_step", [2.5], "ratio", "a step", 2.0, lower_is_better=True)
    for more in ((), (form,)):
        text = section(BenchReport("large", (figure("rank_death_s", [0.1], "s", ""), *more)).json())
        assert ("verifies two drafts" in text and "not beside llama.cpp" in text) == bool(more)
    assert "| 2.50 | 2.50 to 2.50 | at most 2, missed |" in text


def test_a_missed_goal_is_called_missed():
    kept = results(
        figure("high", [0.5, 0.7], "ratio", "x", 0.8),
        figure("met", [0.9], "ratio", "x", 0.8),
        figure("low", [3.0], "ms", "x", 2.0, lower_is_better=True),
        figure("low_met", [1.0], "ms", "x", 2.0, lower_is_better=True),
        figure("none", [1.0], "ms", "x"),
        missing("gone", "ratio", "no peer", 1.0),
    )
    ids = ("high", "met", "low", "low_met", "none", "gone")
    assert [kept.goal(id) for id in ids] == [
        "0.8, missed",
        "0.8",
        "at most 2, missed",
        "at most 2",
        "",
        "1, not measured",
    ]
    assert kept.missed("high") and not kept.missed("gone")


def test_numbers_and_those_that_are_missing():
    kept = results(figure("it", [1234.5, 1300.0, 1200.0], "tokens/s", "x"), figure("small", [7.0], "tokens/s", "x"))
    assert (kept.number("it"), kept.number("it", 0), kept.span("it", 0)) == ("1,234.50", "1,234", "1,200 to 1,300")
    assert (kept.rate("it"), kept.rate("small")) == ("1,234", "7.00")
    assert (kept.number("other"), kept.span("other"), kept.rate("other"), kept.goal("other")) == (
        "n/a",
        "n/a",
        "n/a",
        "",
    )


def test_paragraphs_are_filled_and_tables_are_not():
    long = "word " * 40
    text = wrapped(
        f"# Head\n\n{long}\nmore\n\n{table(['a'], [[long]])}\n\n- one\n  two\n- {long}\n\n```\n{long}\n```\n"
    )
    assert "# Head\n\n" in text
    assert f"| {long} |" in text and f"```\n{long}\n```" in text
    assert "- one two\n- word" in text
    plain = re.sub(r"```.*?```|\|.*\|", "", text, flags=re.DOTALL)
    assert max(map(len, plain.splitlines())) <= 120
