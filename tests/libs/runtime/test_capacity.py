"""What there is room for, and how it is said that there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.runtime.capacity import check_blocks, check_gpu_bytes, check_host_bytes, check_nvme, memory_bytes
from penstock.runtime.config import ConfigError

GIB = 1 << 30


def test_memory() -> None:
    check_host_bytes("host_bytes", memory_bytes())
    with pytest.raises(ConfigError, match=r"host_bytes = .*this machine has \d+[MG]iB of memory; use less"):
        check_host_bytes("host_bytes", memory_bytes() + 1)


def test_a_disk_tier_needs_both_a_place_and_a_size(tmp_path: Path) -> None:
    check_nvme("dir", None, "bytes", 0)
    check_nvme("dir", tmp_path / "not" / "yet", "bytes", 1 << 20)
    assert not list(tmp_path.iterdir()), "looking makes nothing"
    with pytest.raises(ConfigError, match="dir = ''"):
        check_nvme("dir", None, "bytes", 1 << 20)
    with pytest.raises(ConfigError, match="bytes = 0"):
        check_nvme("dir", tmp_path, "bytes", 0)


def test_what_the_tier_holds_already_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slab").write_bytes(b"x" * (1 << 20))
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    check_nvme("dir", tmp_path, "bytes", 1 << 20)
    with pytest.raises(ConfigError, match="bytes = '2MiB': there is room for 1MiB in"):
        check_nvme("dir", tmp_path, "bytes", 2 << 20)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a directory"):
        check_nvme("dir", tmp_path / "file" / "below", "bytes", 1 << 20)


def test_a_gpu_tier() -> None:
    check_gpu_bytes("gpu", 0, lambda: 0)
    with pytest.raises(ConfigError, match="gpu = '1GiB': there is no CUDA device here"):
        check_gpu_bytes("gpu", GIB, lambda: 0)
    with pytest.raises(ConfigError, match="gpu = '9GiB': the GPU has 8GiB of memory"):
        check_gpu_bytes("gpu", 9 * GIB, lambda: 8 * GIB)


def test_a_gpu_tier_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"penstock\[cuda12\]"):
        check_gpu_bytes("gpu", GIB, lambda: 8 * GIB)


def test_a_tier_for_less_than_a_few_blocks_is_none() -> None:
    check_blocks("host", 0, 4096)
    check_blocks("host", 16 * 3 * 4096, 4096)
    with pytest.raises(ConfigError, match="host = '196607B': at least 192KiB: 16 blocks of this model, with 4KiB each"):
        check_blocks("host", 16 * 3 * 4096 - 1, 4096)
