"""What another user can have put there or changed is not opened, and nothing is cut short or followed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from penstock.runtime.private import locked, open_directory, open_file

NOBODY = 65534


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path belongs to another user: really, where the tests may do that, else as this process sees it."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)


def test_what_is_made_is_this_users_alone(tmp_path):
    before = os.umask(0o002)
    try:
        path = tmp_path / "cache" / "penstock" / "kernels"
        directory = open_directory(path)
        os.close(open_file("file", os.O_RDWR | os.O_CREAT, directory, path))
        os.close(directory)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path, path / "file")] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path, mode):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"can be written by other users \\(mode {mode:04o}\\)") as refused:
        open_directory(path)
    assert refused.value.filename == str(path)


def test_so_is_a_directory_of_another_user(tmp_path, monkeypatch):
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    give_away(path, monkeypatch)
    with pytest.raises(PermissionError, match=r"belongs to user \d+, not to user \d+"):
        open_directory(path)


def test_and_a_link_to_a_directory(tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="Not a directory"):
        open_directory(tmp_path / "link")


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    directory = open_directory(tmp_path)
    (tmp_path / "file").write_text("content")
    give_away(tmp_path / "file", monkeypatch)
    with pytest.raises(PermissionError, match=re.escape(str(tmp_path / "file"))):
        open_file("file", os.O_RDONLY, directory, tmp_path)
    os.close(directory)


@pytest.mark.parametrize("kind", ["others can write", "pipe"])
def test_and_one_of_another_kind(tmp_path, kind):
    tmp_path.chmod(0o700)
    directory = open_directory(tmp_path)
    if kind == "pipe":
        os.mkfifo(tmp_path / "file", 0o600)
    else:
        (tmp_path / "file").touch()
        (tmp_path / "file").chmod(0o666)
    with pytest.raises(PermissionError, match=r"can be written by other users|neither a plain file"):
        open_file("file", os.O_RDONLY, directory, tmp_path)
    os.close(directory)


def test_a_lock_that_is_a_link_keeps_what_it_links_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    (path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), locked(path):
        pass
    assert victim.read_text() == "precious"


def test_a_lock_keeps_its_content(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    (path / "lock").write_text("something")
    (path / "lock").chmod(0o600)
    with locked(path):
        assert (path / "lock").read_text() == "something"
