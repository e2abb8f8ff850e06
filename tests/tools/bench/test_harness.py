"""The harness of all benches: its figures, its rounds and its JSON."""

from __future__ import annotations

import json

import pytest

from penstock.bench.harness import BenchReport, cpu_name, figure, interleave


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


@pytest.mark.parametrize(
    ("flags", "vectors"),
    [("sse2 avx2 fma", ", avx2"), ("avx2 avx512f avx512_bf16", ", avx512_bf16"), ("sse2", "")],
)
def test_a_processor_is_told_by_more_than_the_name_that_a_virtual_machine_shows(flags, vectors):
    one = f"cpu family\t: 23\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\npower management:\n"
    assert cpu_name(f"{one}\n{one.replace(': 23', ': 26')}") == f"AMD EPYC (family 23, model 1{vectors})"


def test_a_processor_of_which_linux_says_little_keeps_its_name():
    assert cpu_name("model name : Some ARM\n") == "Some ARM"
    with pytest.raises(KeyError):
        cpu_name("processor : 0\n")
