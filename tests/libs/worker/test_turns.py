"""Where workers agree on turns, and what becomes of a worker that has nowhere to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from structlog.testing import capture_logs

from penstock.engine.config import EngineConfig
from penstock.runtime.turns import baton
from penstock.worker.turns import shared_cores

CONFIG = EngineConfig(model=Path("/nowhere"))


async def test_it_is_a_directory_in_memory_of_this_user_unless_another_is_named(tmp_path, monkeypatch):
    assert baton.shared_directory() == Path(f"/dev/shm/penstock-{os.geteuid()}")
    monkeypatch.setattr("penstock.worker.turns.shared_directory", lambda: tmp_path / "auto")
    for setting, directory in (("auto", tmp_path / "auto"), (str(tmp_path / "other"), tmp_path / "other")):
        async with shared_cores(replace(CONFIG, baton=setting)) as found:
            assert found is not None
            assert list(directory.iterdir())


async def test_none_and_a_device_have_no_baton():
    async with shared_cores(replace(CONFIG, baton="none")) as found:
        assert found is None
    async with shared_cores(replace(CONFIG, device="cuda")) as found:
        assert found is None


async def test_without_shared_memory_one_line_says_so_and_the_worker_runs(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    for directory in (tmp_path / "theirs", Path("/proc/penstock")):
        with capture_logs() as logs:
            async with shared_cores(replace(CONFIG, baton=str(directory))) as found:
                assert found is None
        [line] = logs
        assert line["event"] == "no turns on shared cores"
        assert str(directory) in line["reason"]
