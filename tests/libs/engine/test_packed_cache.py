"""Packed files: made once, checked when opened, never served wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.kernels.cpu import packed_file
from penstock.engine.kernels.cpu.pack import Packed, pack
from penstock.engine.kernels.cpu.packed_cache import PackedCache
from penstock.engine.kernels.cpu.packed_file import PAGE, finish, record_of, write_bytes
from penstock.engine.kernels.cpu.packing import naive_checksums

MATRICES = {
    kind: pack(torch.randn(34, 40, generator=torch.Generator().manual_seed(1)), kind)
    for kind in ("float32", "bfloat16", "int8")
}
GENEROUS = 1 << 30


def write(file: int, matrices: dict[str, Packed] = MATRICES) -> None:
    """A whole packed file."""
    records, end = {}, PAGE
    for name, packed in matrices.items():
        records[name], tensors, end = record_of(packed, end)
        for place, tensor in tensors:
            write_bytes(file, place.at, tensor)
    finish(file, records, end, naive_checksums)


def cache(directory: Path, limit: int = GENEROUS) -> PackedCache:
    return PackedCache(directory, limit, naive_checksums)


def obtain(directory: Path, name: str = "model", limit: int = GENEROUS):
    return cache(directory, limit).obtain(name, 20_000, write)


def path_of(directory: Path, name: str = "model") -> Path:
    return directory / f"{name}-v{packed_file.FORMAT}.packed"


def assert_whole(matrices) -> None:
    assert matrices.keys() == MATRICES.keys()
    for name, expected in MATRICES.items():
        found = matrices[name]
        assert (found.kind, found.inputs, found.outputs) == (expected.kind, expected.inputs, expected.outputs)
        assert torch.equal(found.data, expected.data)
        assert (found.scale is None) == (expected.scale is None)
        assert found.scale is None or torch.equal(found.scale, expected.scale)


def forget_boot(path: Path) -> None:
    """As if the machine had started again."""
    with open(path, "r+b") as file:
        file.seek(packed_file._BOOT_AT)
        file.write(b"\0" * packed_file._BOOT_BYTES)


def test_what_is_packed_once_is_found_again(tmp_path):
    first, second = obtain(tmp_path / "new" / "place"), obtain(tmp_path / "new" / "place")
    assert (first.made, second.made) == (True, False)
    assert first.nbytes == second.nbytes
    for found in (first, second):
        assert_whole(found.matrices)
    assert sorted(os.listdir(tmp_path / "new" / "place")) == ["lock", path_of(tmp_path).name]


def test_tensors_begin_at_whole_vectors(tmp_path):
    for packed in obtain(tmp_path).matrices.values():
        assert packed.data.data_ptr() % 64 == 0
        assert packed.scale is None or packed.scale.data_ptr() % 64 == 0


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_packed_anew(tmp_path, share):
    obtain(tmp_path)
    path = path_of(tmp_path)
    os.truncate(path, int(share * path.stat().st_size))
    found = obtain(tmp_path)
    assert found.made
    assert_whole(found.matrices)


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_a_new_start_of_the_machine_no_wrong_bit_is_served(tmp_path, share, bit):
    obtain(tmp_path)
    path = path_of(tmp_path)
    forget_boot(path)
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1 << bit
    path.write_bytes(content)
    found = obtain(tmp_path)
    assert_whole(found.matrices)  # the bit may lie where nothing is said


def test_data_are_checked_once_per_boot(tmp_path):
    checks = []

    def counting(content: torch.Tensor) -> bytes:
        checks.append(content.numel())
        return naive_checksums(content)

    counted = PackedCache(tmp_path, GENEROUS, counting)
    for checked in (0, 1, 0):
        obtain(tmp_path)
        if checked:
            forget_boot(path_of(tmp_path))
        assert not counted.obtain("model", 0, write).made
        assert len(checks) == checked
        checks.clear()


def test_a_file_of_another_format_is_packed_anew(tmp_path, monkeypatch, caplog):
    obtain(tmp_path)
    content = bytearray(path_of(tmp_path).read_bytes())
    content[: len(packed_file._MAGIC)] = b"penstock packed 0000"
    path_of(tmp_path).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert obtain(tmp_path).made
    assert "are not used: it does not begin like" in caplog.text


def test_somebody_elses_file_is_not_used(tmp_path, monkeypatch):
    obtain(tmp_path)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert cache(tmp_path)._use(path_of(tmp_path)) is None


def test_a_link_is_not_followed(tmp_path):
    obtain(tmp_path, "other")
    path_of(tmp_path).symlink_to(path_of(tmp_path, "other"))
    with pytest.raises(OSError, match="symbolic links"):
        obtain(tmp_path)


def test_what_was_used_longest_ago_goes_first(tmp_path):
    obtain(tmp_path, "a")
    size = path_of(tmp_path, "a").stat().st_size
    limit = 2 * size + 20_000 + size // 2
    for age, name in enumerate("cba"):
        obtain(tmp_path, name)
        os.utime(path_of(tmp_path, name), (0, 1000 - age))
    held = obtain(tmp_path, "a")  # was the oldest
    obtain(tmp_path, "d", limit)
    assert sorted(path.name[0] for path in tmp_path.glob("*.packed")) == ["a", "c", "d"]
    obtain(tmp_path, "e", 20_000)
    assert [path.name[0] for path in tmp_path.glob("*.packed")] == ["e"]
    assert_whole(held.matrices)  # removed, and still ours


def test_a_file_larger_than_the_limit_has_no_place(tmp_path):
    obtain(tmp_path, "a")
    with pytest.raises(OSError, match="20000 bytes are more than the 10000"):
        obtain(tmp_path, "b", 10_000)
    assert [path.name[0] for path in tmp_path.glob("*.packed")] == ["a"]


def test_a_full_disk_has_no_place(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:3], 0, 0, *real[5:10])))
    with pytest.raises(OSError, match="No space left"):
        obtain(tmp_path)


def test_making_that_fails_leaves_nothing(tmp_path):
    def fail(file: int) -> None:
        os.write(file, b"some")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cache(tmp_path).obtain("model", 10, fail)
    assert os.listdir(tmp_path) == ["lock"]
    assert obtain(tmp_path).made


def _die(directory: Path) -> None:
    def half(file: int) -> None:
        write(file)
        os.truncate(file, os.fstat(file).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    cache(directory).obtain("model", 10, half)


def processes_of_their_own():
    """They are forked from a process that has loaded what they need and has no threads, as this one may."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def test_who_is_killed_while_packing_leaves_nothing_bad(tmp_path):
    process = processes_of_their_own().Process(target=_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not path_of(tmp_path).exists()
    assert list(tmp_path.glob("*.part")), "it died in the middle"
    found = obtain(tmp_path)
    assert found.made
    assert_whole(found.matrices)
    assert not list(tmp_path.glob("*.part"))


def _take_part(directory: Path, together, made) -> None:
    together.wait()
    found = obtain(directory)
    assert_whole(found.matrices)
    if found.made:
        made.release()


def test_of_many_who_start_at_once_one_packs(tmp_path):
    context = processes_of_their_own()
    together, made = context.Barrier(5), context.Semaphore(0)
    processes = [context.Process(target=_take_part, args=(tmp_path, together, made)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 5
    assert made.acquire(block=False)
    assert not made.acquire(block=False)
