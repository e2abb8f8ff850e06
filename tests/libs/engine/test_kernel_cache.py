"""Compiled code comes from a place of this user's own, or not at all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.libs.runtime.test_private import NOBODY, give_away

from penstock.engine.kernels.cpu import build
from penstock.engine.kernels.cpu.packed_cache import PackedCache
from penstock.engine.kernels.cpu.packing import naive_checksums
from penstock.testing.checkpoints import write_checkpoint

_TRAP = """
#include <cstdio>
__attribute__((constructor)) static void run() { fclose(fopen("MARK", "w")); }
"""
_RUNNER = """
import logging, sys
from pathlib import Path
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
config = EngineConfig(model=Path(sys.argv[1]), kv_pool_tokens=64)
runner = Runner(inspect(config.model), config)
print("compiled" if runner._compiled is not None else "by torch")
"""


def trap(path: Path, mark: Path) -> None:
    """A library that leaves a mark as soon as somebody loads it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = ("g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path))
    subprocess.run(command, input=_TRAP.replace("MARK", str(mark)), text=True, check=True)
    path.chmod(0o700)


@pytest.mark.parametrize("theirs", ["directory", "file", "mode of the directory", "mode of the file"])
def test_code_of_another_user_is_not_run(tmp_path, monkeypatch, theirs):
    path, mark = tmp_path / "kernels" / build.file_name(), tmp_path / "mark"
    trap(path, mark)
    place = path.parent if "directory" in theirs else path
    if "mode" in theirs:
        place.chmod(0o777)
    else:
        give_away(place, monkeypatch)
    with pytest.raises(build.NotBuilt, match=r"belongs to user|can be written by other users"):
        build.load(build.cached(path.parent))
    assert not mark.exists()


def test_a_link_to_code_is_not_followed(tmp_path):
    own, mark = tmp_path / "own.so", tmp_path / "mark"
    trap(own, mark)
    path = tmp_path / "kernels" / build.file_name()
    path.parent.mkdir(mode=0o700)
    path.symlink_to(own)
    with pytest.raises(build.NotBuilt, match="symbolic links"):
        build.load(path)
    assert not mark.exists()


def test_the_trap_would_snap(tmp_path):
    trap(tmp_path / "kernels" / "own.so", tmp_path / "mark")
    with pytest.raises(build.NotBuilt, match="which layout"):
        build.load(tmp_path / "kernels" / "own.so")
    assert (tmp_path / "mark").exists()


def test_nothing_is_cut_short_where_a_lock_is_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for part in ("kernels", "packed"):
        (tmp_path / part).mkdir(mode=0o700)
        (tmp_path / part / "lock").symlink_to(victim)
    with pytest.raises(build.NotBuilt, match="symbolic links"):
        build.cached(tmp_path / "kernels")
    with pytest.raises(OSError, match="symbolic links"):
        PackedCache(tmp_path / "packed", 1 << 30, naive_checksums).obtain("model", 10, lambda file: None)
    assert victim.read_text() == "precious"


def test_torch_computes_where_the_cache_is_not_ones_own(tmp_path):
    """A whole process, with a cache that others can write to."""
    directory = write_checkpoint(tmp_path / "model")
    cache, mark = tmp_path / "cache" / "penstock" / "kernels", tmp_path / "mark"
    trap(cache / build.file_name(), mark)
    if os.geteuid() == 0:
        os.chown(cache, NOBODY, NOBODY)
    else:
        cache.chmod(0o777)
    command = (sys.executable, "-c", _RUNNER, str(directory))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.endswith("by torch\n")
    assert f"no C++ kernels, torch computes everything: {cache}: it" in done.stdout
    assert not mark.exists()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The library for this processor as an image has it: no compiler is there, and nothing was compiled yet."""
    place = tmp_path / "prebuilt"
    place.mkdir(mode=0o755)
    shutil.copy(build.cached(build.kernels_directory()), place)
    monkeypatch.setattr(build, "PREBUILT", place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return place / build.file_name()


def test_what_was_installed_is_taken_without_a_compiler(installed, tmp_path):
    assert build.present() == installed
    build.library.__wrapped__()
    assert not (tmp_path / "cache").exists()


def test_what_was_installed_with_other_sources_or_flags_is_not(installed, monkeypatch):
    monkeypatch.setattr(build, "_FLAGS", [*build._FLAGS, "-DOTHER"])
    assert build.present() is None
    with pytest.raises(build.NotBuilt, match=r"no C\+\+ compiler"):
        build.library.__wrapped__()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may install for others")
def test_what_root_installed_serves_all_users_but_nothing_else_of_root(installed, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    shutil.copy(installed, own)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    build.load(installed)
    with pytest.raises(build.NotBuilt, match="belongs to user 0, not to user"):
        build.load(own / installed.name)


@pytest.mark.parametrize("place", ["directory", "file"])
def test_what_another_user_put_there_is_refused(installed, place, monkeypatch):
    give_away(installed.parent if place == "directory" else installed, monkeypatch)
    with pytest.raises(build.NotBuilt, match="belongs to user"):
        build.library.__wrapped__()


def test_every_instruction_set_is_installed_for_every_user(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_compile", lambda compiler, target, path: path.write_bytes(b""))
    made = build.prebuild()
    sets = [path.name.split("-")[0] for path in made]
    assert sets == list(build._TARGETS[platform.machine()]) and {*build.instruction_sets()} <= {*sets}
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "prebuilt", *made)] == [0o755] * (len(made) + 1)
