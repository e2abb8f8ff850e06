"""What a process finds out about the place where it runs: each problem says what to do."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from penstock.runtime import findings
from penstock.runtime.findings import disk, open_files, shared_memory


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, ok in ((findings.LEAST_FILES, True), (1024, False), (resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        found = open_files()
        assert found.ok is ok
        assert ("LimitNOFILE" in found.advice) is not ok
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5000, 5000))
    monkeypatch.setattr(findings, "_used_files", lambda: 4000)
    assert not open_files().ok, "half of them should be free"


def test_shared_memory(tmp_path: Path) -> None:
    assert shared_memory(path=tmp_path).ok
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    missing = shared_memory(path=tmp_path / "none")
    assert not missing.ok and "mount a tmpfs" in missing.advice
    small = shared_memory(1 << 60, tmp_path)
    assert not small.ok and "make room for" in small.advice


def test_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk(tmp_path, 1 << 20, 0).ok
    assert not disk(tmp_path / "none", 1 << 20, 0).ok
    full = disk(tmp_path, 1 << 60, 0)
    assert not full.ok and "lower --nvme-bytes" in full.advice
    assert disk(tmp_path, 1 << 60, 1 << 60).ok, "what the tier has already counts"
    monkeypatch.setattr(findings, "_writable", lambda directory: "Read-only file system")
    broken = disk(tmp_path, 1 << 20, 0)
    assert not broken.ok and "Read-only file system" in broken.found and "mount it writable" in broken.advice


def test_a_file_where_a_directory_should_be_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert findings._writable(tmp_path / "file")
    assert not findings._writable(tmp_path)
