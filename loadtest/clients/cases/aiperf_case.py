"""AIPerf, the load generator of Dynamo."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from case import MODEL, MODEL_DIR, URL, case, counted, report

REQUESTS, OUTPUT = 24, 24


def load(*more: str) -> None:
    """Made-up prompts; none fails, and what the generator counts is what the mesh does."""
    before = counted()
    with tempfile.TemporaryDirectory() as directory:
        command = (
            *(str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", URL, "--streaming"),
            *("--tokenizer", MODEL_DIR, "--isl", "160", "--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true"),
            *("--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"),
            *("--artifact-dir", directory, *more),
        )
        done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
        assert done.returncode == 0, (done.stderr or done.stdout)[-400:]
        found = json.loads(next(Path(directory).rglob("profile_export_aiperf.json")).read_text())
    failed = found.get("error_request_count") or {"avg": 0}
    assert (found["request_count"]["avg"], failed["avg"]) == (REQUESTS, 0), found.get("error_summary")
    told = (found["total_isl"]["avg"], found["total_osl"]["avg"])
    assert told[1] == REQUESTS * OUTPUT
    assert told == tuple(after - earlier for after, earlier in zip(counted(), before, strict=True)), told


@case
def chat():
    load("--endpoint-type", "chat", "--concurrency", "4", "--request-count", str(REQUESTS))


@case
def completions():
    load("--endpoint-type", "completions", "--request-rate", "8", "--request-count", str(REQUESTS))


@case
def sessions():
    load(
        "--endpoint-type",
        "chat",
        "--num-sessions",
        str(REQUESTS // 3),
        "--session-turns-mean",
        "3",
        "--concurrency",
        "4",
    )


report(aiperf=version("aiperf"))
