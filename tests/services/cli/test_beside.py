"""How two workers compute beside each other, measured by real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cli import beside
from penstock.cli.beside import pace_beside
from penstock.cli.busy import pace, step_of

ONE = (min(os.sched_getaffinity(0)),)


def test_two_on_one_core_keep_about_half(tmp_path: Path) -> None:
    assert 0.1 < pace_beside([ONE, ONE], tmp_path) < 0.95


def test_it_is_measured_once_for_the_same_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paces = iter([0.5, 0.75, 0.25])
    monkeypatch.setattr(beside, "_measured", lambda *_: next(paces))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.2, 0, 0))
    assert [pace_beside([(0,), (1,), (2,)], tmp_path) for _ in range(2)] == [0.5, 0.5]
    assert pace_beside([(1,), (0,)], tmp_path) == 0.75
    for note in tmp_path.iterdir():
        note.write_text("rubbish\n")
    assert pace_beside([(0,), (1,)], tmp_path) == 0.25, "a damaged note counts as none"


def test_what_a_busy_machine_shows_is_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paces = iter([0.5, 0.75])
    monkeypatch.setattr(beside, "_measured", lambda *_: next(paces))
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 0, 0))
    assert [pace_beside([(0,), (1,)], tmp_path) for _ in range(2)] == [0.5, 0.75]


def test_without_a_place_for_notes_it_is_measured_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    paces = iter([0.5, 0.75])
    monkeypatch.setattr(beside, "_measured", lambda *_: next(paces))
    assert [pace_beside([(0,), (1,)], tmp_path / "file") for _ in range(2)] == [0.5, 0.75]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_pace_is_that_of_one_step_at_least(kind: str) -> None:
    assert pace(step_of(kind), 0.0) > 0


def test_a_process_that_can_not_stay_on_its_cores_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"ended with 1|Broken pipe"):
        pace_beside([(4000,), ONE], tmp_path)
    assert not [*tmp_path.iterdir()]
