"""Logs carry request, trace and service; each process configures its own, so a process is what is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LIBS = Path(__file__).parents[3] / "libs"

PROGRAM = """
import structlog
from opentelemetry import trace
from penstock.runtime.context import request_scope, trace_id
from penstock.runtime.telemetry import telemetry

with telemetry("toy", "{level}"):
    log = structlog.get_logger("x")
    log.info("outside")
    with trace.get_tracer("t").start_as_current_span("s"), request_scope("r-1"):
        log.warning("inside", answer=42)
        print(trace_id())
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("a fault")
"""


def run(level: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(LIBS)}
    environment.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{level}", level)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def test_lines_are_json_and_carry_request_trace_and_service() -> None:
    done = run("info")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    outside, inside, fault = lines
    assert (outside["event"], outside["level"], outside["service"]) == ("outside", "info", "toy")
    assert "request_id" not in outside
    assert "trace_id" not in outside
    assert (inside["request_id"], inside["answer"]) == ("r-1", 42)
    assert inside["trace_id"] == done.stdout.strip()
    assert len(inside["trace_id"]) == 32
    assert "ZeroDivisionError" in fault["exception"]


RECORDED = """
import os
from opentelemetry import trace
from penstock.runtime.telemetry import recording, telemetry

with telemetry("toy"), trace.get_tracer("t").start_as_current_span("s") as span:
    print(recording(), span.is_recording(), span.get_span_context().is_valid, "grpc" in __import__("sys").modules)
"""


def test_without_an_exporter_nothing_is_recorded() -> None:
    """But for the ids, which log lines carry; nor is an exporter loaded."""
    environment = {**os.environ, "PYTHONPATH": str(LIBS)}
    environment.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
    done = subprocess.run([sys.executable, "-c", RECORDED], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split() == ["False", "False", "True", "False"], done.stderr


def test_the_level_filters() -> None:
    assert [json.loads(line)["event"] for line in run("error").stderr.splitlines()] == ["a fault"]


def test_an_unknown_level_is_refused() -> None:
    done = run("loud")
    assert done.returncode != 0
    assert "log_level = 'loud': use debug, info, warning or error" in done.stderr
