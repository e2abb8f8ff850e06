"""A disk that fails, is full, too slow or hangs, and calls that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.services.kvstore.disk.disks import SLOT, FaultyFiles, bench, contents
from tests.services.kvstore.helpers import eventually, keys, puts, spec

from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import PAGE


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EFBIG])
async def test_a_disk_that_can_not_be_written_is_left_alone_and_tried_again(tmp_path: Path, error: int) -> None:
    files = FaultyFiles()
    async with bench(tmp_path, files) as bed:
        await bed.write(puts(2))
        files.write_error = error
        assert await bed.write(puts(2, "b")) == 0
        stats = bed.stats()
        assert (stats.writing, stats.write_failures, stats.blocks) == (0, 1, 2)
        assert stats.used_bytes == 2 * SLOT, "no slot is lost"
        assert bed.spaces.condition.writes_wait_s(1) == pytest.approx(1.0)
        assert await bed.bring(keys(2)) == list(contents(2).values()), "reading goes on"
        bed.clock[0] += 1.0
        assert bed.spaces.condition.writes_wait_s(1) == 0
        await bed.write(puts(1, "c"))
        assert bed.spaces.condition.writes_wait_s(1) == pytest.approx(2.0), "longer each time"
        bed.clock[0] += 2.0
        files.write_error = 0
        assert await bed.write(puts(2, "b")) == 2
        assert bed.stats().writing == 1


async def test_no_space_for_a_slab(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.allocate_error = errno.ENOSPC
    async with bench(tmp_path, files) as bed:
        assert await bed.write(puts(2)) == 0
        assert bed.stats().writing == 0
        files.allocate_error = 0
        bed.clock[0] += 1
        assert await bed.write(puts(2)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=400k,mode=700", "tmpfs", str(tmp_path)]
    if (await asyncio.to_thread(subprocess.run, command, capture_output=True)).returncode:
        pytest.skip("can't mount")
    try:
        async with bench(tmp_path, slots=20, direct=True) as bed:
            assert await bed.write(puts(20)) == 20
        async with bench(tmp_path, block_spec=spec(model="33" * 32), slots=400, direct=True) as bed:
            assert await bed.write(puts(20)) == 0, "one slab of 400 slots does not fit"
            assert bed.stats().writing == 0
        async with bench(tmp_path, slots=20, direct=True) as bed:
            assert await bed.bring(keys(20)) == list(contents(20).values())
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", str(tmp_path)], check=True)


async def test_a_sector_that_can_not_be_read_costs_its_block_only(tmp_path: Path) -> None:
    files = FaultyFiles()
    async with bench(tmp_path, files) as bed:
        await bed.write(puts(4))
        files.bad = {2 * SLOT + PAGE + 100}
        assert await bed.bring(keys(4)) == list(contents(4).values())[:2]
        stats = bed.stats()
        assert (stats.unreadable, stats.read_failures, stats.reading, stats.blocks) == (1, 1, 0, 3)
        assert bed.disk.has_blocks(keys(4)) == 0, "the disk is left alone"
        bed.clock[0] += 1
        assert bed.disk.has_blocks(keys(4)) == 2
        assert await bed.bring(keys(2)) == list(contents(2).values())
        assert bed.stats().reading == 1


async def test_a_dead_disk_is_asked_a_bounded_number_of_times(tmp_path: Path) -> None:
    files = FaultyFiles()
    async with bench(tmp_path, files) as bed:
        await bed.write(puts(40))
        files.read_error, files.reads = errno.EIO, 0
        for _ in range(1000):
            if bed.disk.has_blocks(keys(40)):
                assert await bed.bring(keys(40)) == []
            bed.clock[0] += 0.1
        assert files.reads < 20, "100 s"
        assert bed.stats().blocks >= 30


class SlowFiles(Files):
    """Reads wait for `go`."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.go.set()

    def read(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        self.begun.set()
        self.go.wait(10)
        return super().read(fd, buffers, at)


async def test_cancelled_while_a_thread_reads(tmp_path: Path) -> None:
    """The slot that the thread writes into is nobody's until the thread has ended."""
    files = SlowFiles()
    async with bench(tmp_path, files) as bed:
        await bed.write(puts(4))
        files.go.clear()
        files.begun.clear()
        room = Room(bed.host, bed.arena, bed.now, lambda: None)
        bringing = asyncio.create_task(bed.disk.bring_blocks(keys(4), room, bed.now() + 10))
        await asyncio.to_thread(files.begun.wait, 10)
        bringing.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
            bringing.cancel()
        assert not bringing.done()
        assert bed.host.stats().reserved == 4
        files.go.set()
        with pytest.raises(asyncio.CancelledError):
            await bringing
        room.close()
        stats = bed.host.stats()
        assert (stats.reserved, stats.used_bytes) == (0, 0)
        assert await bed.bring(keys(4)) == list(contents(4).values()), "and no pin is left on the disk's side"
        assert await bed.write(puts(60, "b")) == 60
        assert await bed.write(puts(10, "c")) == 10


async def test_a_disk_that_gives_what_it_can_in_time_is_not_too_slow(tmp_path: Path) -> None:
    """A lease of more than its time allows is cut off; the next one gets the rest."""

    class FirstFile(SlowFiles):
        """Reads of the first file never wait."""

        def __init__(self) -> None:
            super().__init__()
            self.fd = -1

        def open(self, path: Path, *, direct: bool) -> int:
            fd = super().open(path, direct=direct)
            self.fd = fd if path.name == "slab-000000.blocks" else self.fd
            return fd

        def read(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
            return Files.read(self, fd, buffers, at) if fd == self.fd else super().read(fd, buffers, at)

    files, size = FirstFile(), 4 << 20
    async with bench(tmp_path, files, spec(size), slots=4, host_slots=4) as bed:
        await bed.write(puts(4, block_bytes=size))
        files.go.clear()
        room = Room(bed.host, bed.arena, bed.now, lambda: None)
        bringing = asyncio.create_task(bed.disk.bring_blocks(keys(4), room, bed.now() + 1))
        await eventually(lambda: bed.host.lookup(keys(4)) == 1)
        bed.clock[0] += 2
        bringing.cancel()
        files.go.set()
        with pytest.raises(asyncio.CancelledError):
            await bringing
        room.close()
        assert bed.disk.has_blocks(keys(4)) == 4
        assert (bed.stats().reading, bed.stats().read_failures) == (1, 0)


async def test_a_disk_that_is_too_slow_is_left_alone(tmp_path: Path) -> None:
    files = SlowFiles()
    async with bench(tmp_path, files) as bed:
        await bed.write(puts(4))
        files.go.clear()
        files.begun.clear()
        room = Room(bed.host, bed.arena, bed.now, lambda: None)
        bringing = asyncio.create_task(bed.disk.bring_blocks(keys(4), room, bed.now() + 1))
        await asyncio.to_thread(files.begun.wait, 10)
        bed.clock[0] += 2
        bringing.cancel()
        files.go.set()
        with pytest.raises(asyncio.CancelledError):
            await bringing
        room.close()
        assert bed.disk.has_blocks(keys(4)) == 0
        stats = bed.stats()
        assert (stats.reading, stats.read_failures) == (0, 1)
        bed.clock[0] += 1
        assert bed.disk.has_blocks(keys(4)) == 4


async def test_cancelled_while_a_write_fails(tmp_path: Path) -> None:
    """The failure does not swallow the cancellation."""

    class Hanging(Files):
        def __init__(self) -> None:
            self.go, self.begun = threading.Event(), threading.Event()

        def write(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
            self.begun.set()
            self.go.wait(10)
            raise OSError(errno.EIO, "bad")

    files = Hanging()
    async with bench(tmp_path, files) as bed:
        writing = asyncio.create_task(bed.write(puts(4)))
        await asyncio.to_thread(files.begun.wait, 10)
        writing.cancel()
        await asyncio.sleep(0)
        files.go.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert bed.stats().used_bytes == 0


async def test_what_left_for_a_block_that_is_not_written_is_gone_for_the_next_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place has its header still: an eviction of its tenant would not find it there."""
    async with bench(tmp_path, slots=8) as bed:
        await bed.write(puts(8))

        def fails(*_: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(type(bed.disk._space.slabs), "write", fails)
        assert await bed.write(puts(8, "b")) == 0
        monkeypatch.undo()
        await bed.disk.sync()
        left = bed.disk.has_blocks(keys(8))
        assert left < 8
    async with bench(tmp_path, slots=8) as bed:
        assert bed.disk.has_blocks(keys(8)) == left
