"""The progress display: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from penstock.models.display import display, remaining
from penstock.models.presets import PRESETS
from penstock.models.train import Progress

PLAN = replace(PRESETS["tiny"].seedling, minutes=2.0, tokens=10**9)


def shown(terminal: bool, states: list[tuple[Progress, str]]) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, _environ={"TERM": "xterm"} if terminal else {})
    with display(console) as reporter:
        report = reporter("seedling", PLAN)
        for state, note in states:
            report(state, note)
    return file.getvalue()


STATES = [
    (Progress(steps=1, tokens=1000, seconds=1.0, loss=9.0), ""),
    (Progress(steps=25, tokens=90_000, seconds=30.0, loss=1.5), ""),
    (Progress(steps=26, tokens=91_000, seconds=31.0, loss=1.4), "L1 0.50"),
    (Progress(steps=99, tokens=360_000, seconds=120.0, loss=0.25), ""),
]


def test_a_log_gets_a_line_now_and_then_for_every_note_and_at_the_end():
    lines = shown(False, STATES).splitlines()
    assert [re.search(r"step (\d+)", line)[1] for line in lines] == ["25", "26", "99"]
    assert "seedling  25.0%" in lines[0] and "3000/s" in lines[0] and "left 0:01:30" in lines[0]
    assert lines[1].endswith("L1 0.50") and "100.0%" in lines[2] and "loss 0.250" in lines[2]
    assert not any("\x1b" in line for line in lines)


def test_a_terminal_gets_one_bar_and_the_notes_above_it():
    text = shown(True, STATES)
    assert "\x1b" in text and "\r" in text
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).rpartition("seedling")[2]
    assert "100%" in last and "0.36M tokens" in last and "left 0:00:00" in last
    assert "seedling: L1 0.50" in text and "step" not in text


def test_the_time_left_follows_the_share_that_is_done():
    assert remaining(Progress(), PLAN) == "0:00:00"
    assert remaining(Progress(seconds=24.0), PLAN) == "0:01:36"
    by_tokens = replace(PLAN, minutes=1000.0, tokens=100)
    assert remaining(Progress(tokens=25, seconds=1000.0), by_tokens) == "0:50:00"
