"""Notes come back, and those that another user can have written do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.libs.runtime.test_private import give_away

from penstock.runtime.notes import read_note, write_note


def test_a_note_comes_back_until_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "notes" / "a.word"
    assert read_note(path) is None
    write_note(path, "word")
    assert read_note(path) == "word"
    assert [one.stat().st_mode & 0o777 for one in (path.parent, path)] == [0o700, 0o600]
    assert [one.name for one in path.parent.iterdir()] == ["a.word"]
    path.write_text(path.read_text().replace("word", "worm"))
    assert read_note(path) is None
    write_note(path, "word")
    assert read_note(path) == "word"


def test_a_note_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notes" / "a"
    write_note(path, "word")
    give_away(path, monkeypatch)
    assert read_note(path) is None


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_nor_is_one_in_a_directory_that_others_write_to(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "notes" / "a"
    write_note(path, "word")
    path.parent.chmod(mode)
    assert read_note(path) is None
    write_note(path, "other")
    path.parent.chmod(0o700)
    assert read_note(path) == "word"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "notes" / "a"
    victim.write_text("dear to somebody")
    path.parent.mkdir(mode=0o700)
    (path.parent / f"a.{os.getpid()}").symlink_to(victim)
    write_note(path, "word")
    assert (victim.read_text(), read_note(path)) == ("dear to somebody", None)


def test_the_oldest_go(tmp_path: Path) -> None:
    for number in range(260):
        write_note(tmp_path / f"{number}", "word")
        os.utime(tmp_path / f"{number}", ns=(number, number))
    write_note(tmp_path / "last", "word")
    assert len(list(tmp_path.iterdir())) == 256
    assert read_note(tmp_path / "0") is None and read_note(tmp_path / "last") == "word"
