"""Two checkouts in turns: figures are paired within their round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bench.harness import BenchReport, figure, missing
from penstock.bench.paired import checkout, compared, measure, order
from penstock.runtime.config import ConfigError


def run(**values: float | None) -> dict[str, object]:
    """One run of a bench; a value of None was not measured."""
    figures = [
        missing(id, "ms", "gone") if value is None else figure(id, [value], "ms", "x") for id, value in values.items()
    ]
    return json.loads(BenchReport("it", figures).json())


def test_the_ratio_is_taken_within_each_round():
    found = compared("it", [run(a=2.0), run(a=8.0), run(a=3.0)], [run(a=1.0), run(a=10.0), run(a=3.0)])
    [ratio] = found.ratios
    assert (ratio.median, ratio.min, ratio.max) == (1.0, 0.8, 2.0)
    assert (ratio.here, ratio.other) == (3.0, 3.0)
    assert found.rounds == 3


def test_of_a_figure_that_may_be_below_zero_the_difference_is_taken():
    [found] = compared("it", [run(a=-2.0), run(a=3.0)], [run(a=1.0), run(a=0.0)]).ratios
    assert (found.kind, found.median, found.min, found.max) == ("difference", 0.0, -3.0, 3.0)


def test_a_figure_that_one_side_lacks_is_named_and_a_round_without_it_left_out():
    found = compared("it", [run(a=2.0, b=None, new=1.0), run(a=None, b=1.0)], [run(a=1.0, b=1.0), run(a=1.0, b=2.0)])
    assert [(ratio.id, ratio.median) for ratio in found.ratios] == [("a", 2.0), ("b", 0.5)]
    assert found.unpaired == ["new"]
    assert json.loads(found.json())["unpaired"] == ["new"]


@pytest.mark.parametrize(
    ("made", "better"),
    [
        (figure("it", [2.0], "ratio", "x", 1.0), "more"),
        (figure("it", [0.5], "ratio", "x", 1.0), "more"),
        (figure("it", [2.0], "ratio", "x", 1.0, lower_is_better=True), "less"),
        (figure("it", [0.5], "ratio", "x", 1.0, lower_is_better=True), "less"),
        (figure("it", [1.0], "us", "x"), "less"),
        (figure("it", [1.0], "tokens/s", "x"), "more"),
        (figure("it", [1.0], "ratio", "x"), ""),
    ],
)
def test_which_way_is_better_follows_from_goal_or_unit(made, better):
    one = json.loads(BenchReport("it", [made]).json())
    assert compared("it", [one], [one]).ratios[0].better == better


def test_who_goes_first_takes_turns():
    assert [order(round)[0] for round in range(4)] == ["here", "other", "here", "other"]


BENCH = """\
#!/bin/sh
echo "$@" >> {diary}
echo '{{"figures": [{{"id": "a", "unit": "ms", "value": 4.0, "goal": null, "met": null}}]}}'
"""


@pytest.fixture
def pretended(tmp_path: Path) -> Path:
    """A checkout whose Python only writes down what it was asked for, and answers with one figure."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(BENCH.format(diary=tmp_path / "diary"))
    python.chmod(0o755)
    return tmp_path


async def test_both_checkouts_run_the_bench(pretended):
    found = await measure(checkout(pretended), checkout(pretended), "kv", rounds=2, quick=True)
    assert (pretended / "diary").read_text().splitlines() == ["-m penstock.cli bench kv --json --quick"] * 4
    assert [(ratio.median, ratio.here) for ratio in found.ratios] == [(1.0, 4.0)]
    assert found.shown() is not None


async def test_a_bench_that_fails_is_named(pretended):
    (pretended / ".venv/bin/python").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match="ended with 3"):
        await measure(checkout(pretended), checkout(pretended), "nothing", rounds=1, quick=True)


def test_a_checkout_without_an_environment_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.venv/bin/python"):
        checkout(tmp_path)
