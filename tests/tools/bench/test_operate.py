"""The figures of operators: which parts there are, and what they say."""

from __future__ import annotations

import json

import pytest
from tests.tools.load.support import failed, record

from penstock.bench.harness import BenchReport, figure
from penstock.bench.measured.document import section
from penstock.bench.operate import measure
from penstock.bench.operate.images import image_figures, sizes_figures
from penstock.bench.operate.load import lateness_figures
from penstock.runtime.config import ConfigError


def test_lateness_is_told_in_milliseconds_and_beside_the_latency() -> None:
    rounds = [[record(sent=late), record(sent=late), failed()] for late in (0.001, 0.003, 0.002)]
    found = {one.id: one for one in lateness_figures(rounds)}
    delay, part = found["load_schedule_delay_p99_ms"], found["load_schedule_delay_vs_latency"]
    assert (delay.value, delay.min, delay.max) == pytest.approx((2.0, 1.0, 3.0))
    assert part.value == pytest.approx(0.002 / 3.0) and part.met is True
    assert found["load_latency_p50_ms"].value == 3000.0


def test_a_round_without_an_answer_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="not answered at all"):
        lateness_figures([[record()], [failed()]])


def test_an_image_is_beside_its_limit() -> None:
    light, worker = sizes_figures({"image_mb_light": 251.0, "image_mb_worker": 900.5})
    assert (light.value, light.goal, light.met) == (251.0, 250.0, False)
    assert (worker.value, worker.met) == (900.5, True)


async def test_without_a_container_engine_there_are_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = await image_figures(True)
    assert [one.id for one in found] == ["image_mb_light", "image_mb_worker"]
    assert all(one.value is None and one.against.startswith("not tried: ") for one in found)


async def test_parts_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def part(name: str):
        async def figures(quick: bool):
            asked.append((name, quick))
            return [figure(name, [1.0], "s", "")]

        return figures

    monkeypatch.setattr(measure, "PARTS", {name: part(name) for name in ("one", "two")})
    assert [one.id for one in (await measure.measure(True)).figures] == ["one", "two"]
    assert [one.id for one in (await measure.measure(False, ["two"])).figures] == ["two"]
    assert asked == [("one", True), ("two", True), ("two", False)]
    with pytest.raises(ConfigError, match=r"part.*'other'.*must be one of one, two"):
        await measure.measure(True, ["other"])


def test_the_section_has_the_figures_that_there_are() -> None:
    report = BenchReport("operate", [figure("load_schedule_delay_p99_ms", [1.0], "ms", "")])
    text = section(report.json())
    assert "ms | 1.00 | 1.00 to 1.00 |" in text and "median latency |" not in text
    assert json.loads(report.json())["bench"] == "operate"
