"""A model's name is computed again exactly when its files may have changed."""

from __future__ import annotations

import os

import pytest

from penstock.checkpoint import fingerprint, inspect, remembered, remembered_fingerprint
from penstock.runtime import notes
from penstock.testing.checkpoints import TinyModel, write_checkpoint


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model that counts as large and as old."""
    monkeypatch.setattr(remembered, "_WORTH_BYTES", 0)
    monkeypatch.setattr(remembered, "_SETTLED_NS", -(10**9))
    return write_checkpoint(tmp_path / "model", TinyModel(shards=2))


@pytest.fixture
def reads(monkeypatch):
    """Of which checkpoints the weights were read."""
    found = []

    def reading(checkpoint):
        found.append(checkpoint.path)
        return fingerprint(checkpoint)

    monkeypatch.setattr(remembered, "fingerprint", reading)
    return found


def test_it_is_read_once(model, tmp_path, reads):
    names = {remembered_fingerprint(inspect(model), tmp_path / "notes") for _ in range(3)}
    assert names == {fingerprint(model)}
    assert len(reads) == 1


def test_a_change_that_keeps_size_and_time_is_seen(model, tmp_path, reads):
    before = remembered_fingerprint(inspect(model), tmp_path / "notes")
    file = sorted(model.glob("*.safetensors"))[1]
    times = file.stat()
    with open(file, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = remembered_fingerprint(inspect(model), tmp_path / "notes")
    assert before != after == fingerprint(model)


def test_another_context_is_another_name(model, tmp_path, reads):
    one = remembered_fingerprint(inspect(model), tmp_path / "notes")
    config = model / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert remembered_fingerprint(inspect(model), tmp_path / "notes") == fingerprint(model) != one


@pytest.mark.parametrize("content", ["", "abc", "0" * 64 + " " + "0" * 16, "\xff"])
def test_a_damaged_note_is_not_believed(model, tmp_path, reads, content):
    remembered_fingerprint(inspect(model), tmp_path / "notes")
    (note,) = (tmp_path / "notes").iterdir()
    note.write_bytes(content.encode("latin1"))
    assert remembered_fingerprint(inspect(model), tmp_path / "notes") == fingerprint(model)
    assert len(reads) == 2


def test_files_that_just_changed_are_not_remembered(model, tmp_path, reads, monkeypatch):
    monkeypatch.setattr(remembered, "_SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        remembered_fingerprint(inspect(model), tmp_path / "notes")
    assert len(reads) == 2


def test_small_models_leave_no_note(tmp_path, reads):
    model = write_checkpoint(tmp_path / "model")
    assert remembered_fingerprint(inspect(model), tmp_path / "notes") == fingerprint(model)
    assert not (tmp_path / "notes").exists()


def test_without_a_place_for_notes_it_is_read_each_time(model, tmp_path, reads):
    (tmp_path / "notes").write_text("a file")
    for _ in range(2):
        assert remembered_fingerprint(inspect(model), tmp_path / "notes") == fingerprint(model)
    assert len(reads) == 2


def test_old_notes_are_removed(model, tmp_path, reads, monkeypatch):
    monkeypatch.setattr(notes, "_MOST", 2)
    (tmp_path / "notes").mkdir()
    for number in range(4):
        (tmp_path / "notes" / str(number)).write_text("old")
        os.utime(tmp_path / "notes" / str(number), (number, number))
    remembered_fingerprint(inspect(model), tmp_path / "notes")
    assert len(list((tmp_path / "notes").iterdir())) == 2
    remembered_fingerprint(inspect(model), tmp_path / "notes")
    assert len(reads) == 1
