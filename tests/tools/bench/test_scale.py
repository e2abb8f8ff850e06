"""The bench of the planner: its figures, on a workload of a minute."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from penstock.bench.measured.document import section
from penstock.bench.scale import measure


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    chance, at, rows = Random(1), 0.0, []
    for number in range(120):
        at += chance.expovariate(2.0)
        tokens = 512 + round(chance.expovariate(1 / 4000))
        ids = [1000 * number + block for block in range(tokens // 512)]
        rows.append({"timestamp": 1e3 * at, "input_length": tokens, "output_length": 60, "hash_ids": ids})
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_figures_of_planner_static_split_and_reference(trace: Path) -> None:
    report = measure(True, (), [trace])
    found = {one.id: one for one in report.figures}
    assert found["planner_worker_time_vs_static"].goal == 0.8
    assert found["planner_slo_attainment"].goal == 1.0
    workers, static = found["planner_workers_small"].value, found["static_workers_small"].value
    assert workers is not None and static is not None and static >= 2
    assert found["planner_worker_time_vs_static_small"].value == pytest.approx(workers / static)
    assert found["static_met_small"].value >= 0.95
    busy = found["busy_workers_small"].value
    assert busy is not None and 2 <= busy <= workers, "they also start, and drain, and wait"
    assert found["busy_workers_vs_static_small"].value == pytest.approx(busy / static)
    assert found["at_once_met_small"].value >= found["planner_met_small"].value
    for id in ("planner_met_small", "utilisation_met_small"):
        assert 0 < found[id].value <= 1
    text = section(report.json())
    assert text.startswith("## Scaling") and "| small |" in text and "n/a" not in text
