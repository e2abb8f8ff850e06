"""Which form of the weights is faster is measured once, by one process, and kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.engine.kernels.cpu import forms
from penstock.engine.kernels.cpu.forms import FORMS, quicker_form
from penstock.engine.kernels.cpu.machine import Machine


@pytest.fixture
def machine():
    return Machine(1)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that each form takes, and how often it was asked."""
    found = {"bfloat16": 1.0, "lossless": 0.9, "asked": 0}

    def seconds(machine, x, matrices):
        found["asked"] += 1
        return found[matrices[0].kind]

    monkeypatch.setattr(forms, "_seconds", seconds)
    monkeypatch.setattr(forms, "_MATRICES", 1)
    monkeypatch.setattr(forms, "_SIDE", 64)
    return found


@pytest.mark.parametrize(
    ("lossless", "chosen"), [(0.5, "lossless"), (0.94, "lossless"), (0.96, "bfloat16"), (2, "bfloat16")]
)
def test_fewer_bits_are_chosen_where_they_are_clearly_faster(machine, clock, tmp_path, lossless, chosen):
    clock["lossless"] = lossless
    assert quicker_form(machine, tmp_path) == chosen


def test_it_is_measured_once(machine, clock, tmp_path):
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: quicker_form(machine, tmp_path), range(4))) == {"lossless"}
    asked = clock["asked"]
    clock["lossless"] = 2.0
    assert quicker_form(machine, tmp_path) == "lossless" and clock["asked"] == asked
    assert quicker_form(Machine(2), tmp_path) == "bfloat16", "other threads have other times"


def test_a_damaged_note_is_measured_again(machine, clock, tmp_path):
    quicker_form(machine, tmp_path)
    [note] = [path for path in tmp_path.iterdir() if path.name != "lock"]
    note.write_text("lossless 0123")
    clock["lossless"] = 2.0
    assert quicker_form(machine, tmp_path) == "bfloat16"


def test_a_directory_that_cannot_be_used_costs_only_time(machine, clock, tmp_path):
    (tmp_path / "file").write_text("")
    assert quicker_form(machine, tmp_path / "file") == "lossless"


def test_on_this_processor(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(forms, "_MATRICES", 2)
    assert quicker_form(machine, tmp_path) in FORMS
