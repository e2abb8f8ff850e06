"""`penstock plan` from outside, and docs/plan.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import planning
from penstock.cli.planning import app
from penstock.runtime.config import ConfigError
from penstock.sizing import describe

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "plan.md").read_text()
PUBLISHED = "tests/libs/sizing/published"
GIB = 1 << 30


Planned = Callable[..., tuple[int, str]]
"""Exit status and output of a command."""
described = cache(describe)
PlannedJson = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(planning, "describe", described)

    def run(*arguments: str) -> tuple[int, str]:
        code = app(arguments, result_action="return_value", exit_on_error=False)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def planned(plan: Planned) -> PlannedJson:
    def run(*arguments: str) -> dict[str, Any]:
        code, output = plan(*arguments, "--json")
        found: dict[str, Any] = json.loads(output)
        assert code == 1 - found["recommended"]["fits"]
        return found

    return run


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


def test_the_page_shows_what_the_commands_print() -> None:
    shown = re.findall(r"```sh\npenstock plan (.*?)\n```\n```\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) == PAGE.count("```sh") == 2
    for given, output in shown:
        done = command(*shlex.split(given))
        assert done.returncode == 0, done.stderr
        assert done.stdout == output


def table() -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == 7 and row[0] != "model"]


@pytest.mark.parametrize("row", table(), ids=lambda row: " ".join(row[:3]))
def test_the_table_of_the_page_is_what_plan_says(row: list[str], planned: PlannedJson) -> None:
    model, gpus, split, *figures = row
    count, memory = gpus.split(" x ")
    fixed = [f"--{each}" if each.isalpha() else each for each in split.split()]
    found = planned(f"{PUBLISHED}/{model}", "--gpus", count, "--gpu-memory", memory, "--context", "131072", *fixed)
    best = found["recommended"]
    beside = sum((found["gpu_memory"] - stage["weights"]) * stage["ranks"] for stage in best["stages"])
    weights = max(stage["weights"] for stage in best["stages"])
    sizes = [f"{size / GIB:.1f}" for size in (weights, beside, best["left_for_kv"])]
    assert figures == [*sizes, str(best["kv_tokens"])]


def test_there_are_lines_for_both_models_on_both_gpus() -> None:
    assert {row[0] for row in table()} == {"kimi-k2.5", "llama-4-scout"} and len(table()) >= 8


def test_an_embedded_model_is_planned_by_its_name(planned: PlannedJson) -> None:
    found = planned("penstock-mini")
    assert found["model"]["by"] == "headers" and found["kv_token_bytes"] == 6 * 2 * 4 * 64 * 2
    assert found["gpus"] == 1 and found["context"] == found["model"]["max_positions"] == 8192
    assert found["recommended"]["fits"] and found["enough"] is None and found["others"] == []


def test_gpus_are_those_of_the_split_unless_told(planned: PlannedJson) -> None:
    found = planned("penstock-mini", "--tp", "2", "--pp", "3")
    assert found["gpus"] == 6
    ways = [found["recommended"], *found["others"]]
    assert {(way["tp"], way["pp"], way["ep"], way["workers"]) for way in ways} == {(2, 3, 1, 1)}


def test_what_does_not_fit_is_said_with_what_would(plan: Planned, planned: PlannedJson) -> None:
    demand = (f"{PUBLISHED}/llama-4-scout/config.json", "--context", "131072")
    code, said = plan(*demand)
    assert code == 1
    last = r"They do not fit; (\d+) such GPUs hold 1 stream: tp \d+ pp \d+ ep \d+, 1 worker of \d+ ranks"
    gpus = re.fullmatch(last, said.splitlines()[-1])
    assert gpus is not None
    assert plan(*demand, "--gpus", gpus[1])[0] == 0
    assert planned(*demand)["enough"]["fits"]
    code, said = plan("penstock-mini", "--gpu-memory", "2MiB", "--reserve", "1MiB", "--sync-us", "0")
    assert code == 1 and "on 64 times as many GPUs either" in said


def test_some_streams_that_do_not_fit(plan: Planned) -> None:
    code, said = plan("penstock-mini", "--gpu-memory", "1200MiB", "--streams", "4")
    assert code == 1
    assert "holds 3 of 4 streams" in said
    assert "They do not all fit; 2 such GPUs hold 4 streams" in said


def test_who_unpacks_quantised_matrices_is_said(plan: Planned, tmp_path: Path) -> None:
    """Workers keep int4 on a CPU, and float8 nowhere."""
    assert said_of("int4").format(" on a GPU") in plan(f"{PUBLISHED}/kimi-k2.5", "--gpus", "8")[1]
    values = json.loads((ROOT / PUBLISHED / "kimi-k2.5" / "config.json").read_text())["text_config"]
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    small = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "n_routed_experts": 4}
    values |= {**small, "num_experts_per_tok": 2, "quantization_config": form}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert said_of("float8").format("") in plan(str(tmp_path))[1]


def said_of(kind: str) -> str:
    last = "Workers of this version unpack them{}: --dtype bfloat16 counts that."
    return f"Matrices in {kind} are counted as they are stored. {last}"


def test_a_refusal_is_one_line() -> None:
    done = command("nowhere")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"penstock: model = 'nowhere': is no directory, no config.json .*\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((PUBLISHED,), f"{PUBLISHED}/config.json: the file is missing"),
        (("README.md",), "README.md: is not valid JSON"),
        (("penstock-mini", "--gpus", "-1"), "gpus = -1: must be 1 or more, or be left out"),
        (("penstock-mini", "--gpus", "5000"), "gpus = 5000: must be 4096 or less"),
        (("penstock-mini", "--context", "9000"), "context = 9000: must be at most 8192, the model's own limit"),
        (("penstock-mini", "--streams", "0"), "streams = 0: must be more than 0"),
        (("penstock-mini", "--dtype", "int3"), "dtype = 'int3': must be auto, float32, bfloat16, int8, int4 or float8"),
        (("penstock-mini", "--kv-dtype", "int4"), "kv_dtype = 'int4': must be float32, bfloat16 or int8"),
        (("penstock-mini", "--reserve", "80GiB"), "reserve = 85899345920: must be less than gpu_memory"),
        (("penstock-mini", "--sync-us", "-1"), "sync_us = -1.0: must be 0 or more"),
        (("penstock-mini", "--tp", "3"), "tp 3 must divide the 4 attention heads"),
        (("penstock-mini", "--gpus", "8", "--ep", "2"), "ep 2 must be 1: the model has no experts"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(
    arguments: tuple[str, ...], says: str, plan: Planned
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(*arguments)
    assert says in str(error.value)
