"""The harness of all benches: its figures, its rounds and its JSON."""

from __future__ import annotations

import json

from penstock.bench.harness import BenchReport, figure, interleave


async def test_rounds_alternate_and_the_first_is_thrown_away():
    asked = []

    def subject(name):
        async def measure(number):
            asked.append((number, name))
            return number

        return measure

    samples = await interleave({"a": subject("a"), "b": subject("b")}, 3, progress=False)
    assert samples == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert asked == [(0, "b"), (0, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]


def test_a_figure_is_a_median_with_its_range_and_its_goal():
    found = figure("ratio", [0.7, 0.9, 0.8], "ratio", "the limit", 0.75)
    assert (found.value, found.min, found.max, found.met) == (0.8, 0.7, 0.9, True)
    assert figure("added", [12.0, 9.0], "ms", "bare", 10.0, lower_is_better=True).met is False
    assert figure("scale", [1.0], "tokens/s", "for scale").met is None


def test_the_json_has_what_programs_read():
    report = BenchReport("overhead", [figure("ratio", [0.5], "ratio", "bare", 0.8)])
    found = json.loads(report.json())
    assert set(found) == {"bench", "host", "versions", "figures"}
    assert set(found["figures"][0]) == {"id", "value", "unit", "min", "max", "against", "goal", "met"}
    assert found["versions"]["python"]
    assert report.table().row_count == 1
