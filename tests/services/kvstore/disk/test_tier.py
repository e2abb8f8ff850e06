"""The disk tier by itself: what it keeps, what it refuses, and what a failing disk does to it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.services.kvstore.disk.disks import SLOT, FaultyFiles, bench, contents, opened, slabs, spaces_of
from tests.services.kvstore.helpers import BLOCK_BYTES, eventually, keys, puts, spec

from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import PAGE, Drop
from penstock.kvstore.tiers.disk.space import Damaged
from penstock.kvstore.tiers.disk.stats import NvmeStats
from penstock.runtime.config import ConfigError


def dropped(stats: NvmeStats) -> dict[str, int]:
    return {drop.value: count for drop in Drop if (count := getattr(stats, drop.value))}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("block_bytes", [4096, 100, 5000, 65536, 1 << 20])
async def test_blocks_come_back_after_a_restart(tmp_path: Path, block_bytes: int, direct: bool) -> None:
    blocks, size = puts(9, block_bytes=block_bytes), spec(block_bytes)
    async with bench(tmp_path, block_spec=size, direct=direct, slots=24) as bed:
        assert await bed.write(blocks, seconds=1.5, namespace=b"n" * 16) == 9
        assert await bed.bring(keys(9)) == [bytes(put.data) for put in blocks]
    async with bench(tmp_path, block_spec=size, direct=direct, slots=24) as bed:
        assert bed.disk.has_blocks(keys(12)) == 9
        assert set(bed.disk.table.keys()) == set(keys(9))
        assert await bed.bring(keys(12)) == [bytes(put.data) for put in blocks]
        stats = bed.stats()
        assert (stats.blocks, stats.read_blocks, stats.written_blocks) == (9, 9, 0)
        assert stats.used_bytes == 9 * bed.disk.slot_bytes
        assert dropped(stats) == {}
        assert stats.direct == direct


async def test_what_is_known_of_a_block_survives(tmp_path: Path) -> None:
    async with bench(tmp_path) as bed:
        stored = bed.put(puts(2), seconds=1.5, namespace=b"n" * 16)
        stored[1].uses = 7
        views = [bed.arena.block(block.slot, BLOCK_BYTES) for block in stored]
        await bed.disk.write(list(zip(stored, views, strict=True)))
        del views
    async with bench(tmp_path) as bed:
        room = Room(bed.host, bed.arena, bed.now, lambda: None)
        assert await bed.disk.bring_blocks(keys(2), room, 10) == 2
        block = bed.host.find(keys(2)[1])
        assert block is not None
        assert (block.parent, block.first_token, block.seconds) == (keys(1)[0], 16, 1.5)
        assert (block.namespace, block.uses) == (b"n" * 16, 7)


async def test_the_oldest_leaf_goes_for_what_is_new(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=10) as bed:
        await bed.write(puts(6))
        await bed.write(puts(4, "b"))
        bed.disk.touch(keys(6), "")  # used later than b
        assert await bed.write(puts(3, "c")) == 3
        assert (bed.disk.has_blocks(keys(6)), bed.disk.has_blocks(keys(4, "b")), bed.disk.has_blocks(keys(3, "c"))) == (
            6,
            1,
            3,
        )
        assert bed.stats().evictions == 3
    async with bench(tmp_path, slots=10) as bed:
        assert (bed.disk.has_blocks(keys(6)), bed.disk.has_blocks(keys(4, "b")), bed.disk.has_blocks(keys(3, "c"))) == (
            6,
            1,
            3,
        )
        assert await bed.bring(keys(3, "c")) == list(contents(3, "c").values())


# -- damage


@hypothesis_settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 6 * SLOT - 1), flip=st.integers(1, 255), cut=st.booleans())
async def test_one_flipped_byte_or_a_cut_never_shows_in_a_block(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("slab")
    try:
        async with bench(path, slots=6) as bed:
            await bed.write(puts(6))
        slab = slabs(path)[0]
        if cut:
            os.truncate(slab, at)
        else:
            with slab.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ flip]))
        async with bench(path, slots=6) as bed:
            found = [await bed.bring([name]) for name in keys(6)]
            for got, right in zip(found, contents(6).values(), strict=True):
                assert got in ([], [right])
            lost = found.count([])
            if cut and at == 0:
                return  # as a file that was made and not filled
            assert lost <= (6 if cut else 1)
            assert sum(dropped(bed.stats()).values()) == lost or not lost
            assert bed.stats().blocks == 6 - lost
    finally:
        shutil.rmtree(path)


async def test_shuffled_slots_and_swapped_files_are_right_or_absent(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=8) as bed:
        await bed.write(puts(8))
    slab = slabs(tmp_path)[0]
    data = slab.read_bytes()
    slots = [data[at : at + SLOT] for at in range(0, len(data), SLOT)]
    random.Random(3).shuffle(slots)
    slab.write_bytes(b"".join(slots))
    async with bench(tmp_path, slots=8) as bed:
        assert await bed.bring(keys(8)) == list(contents(8).values()), "a slot says itself what it is"
    slab.write_bytes(b"".join(slot[:PAGE] + other[PAGE:] for slot, other in zip(slots, reversed(slots), strict=True)))
    async with bench(tmp_path, slots=8) as bed:
        for name in keys(8):
            assert await bed.bring([name]) == [], "headers with the blocks of others"
        assert dropped(bed.stats()) == {"corrupt": 8}


@pytest.mark.parametrize(
    "other", [spec(dtype="bfloat16"), spec(model="ef" * 32), spec(layout="v2"), spec(tokenizer="0" * 64)]
)
async def test_another_specs_blocks_are_a_miss_even_under_the_same_name(tmp_path: Path, other: object) -> None:
    async with bench(tmp_path, slots=512) as bed:
        await bed.write(puts(4))
    async with bench(tmp_path, block_spec=other, slots=512) as bed:  # type: ignore[arg-type]
        assert bed.disk.has_blocks(keys(4)) == 0
        mine = bed.spaces.home.space(other)  # type: ignore[arg-type]
        await bed.write(puts(1, "z"))
    theirs = next(path for path in slabs(tmp_path) if path.parent != mine)
    (mine / "slab-000000.blocks").write_bytes(theirs.read_bytes())  # somebody copied files around
    async with bench(tmp_path, block_spec=other, slots=512) as bed:  # type: ignore[arg-type]
        assert bed.disk.has_blocks(keys(4)) == 0
        assert dropped(bed.stats()) == {"foreign": 4}
    async with bench(tmp_path, slots=512) as bed:
        assert await bed.bring(keys(4)) == list(contents(4).values()), "the first spec's are still there"


async def test_another_version_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path) as bed:
        await bed.write(puts(4))
    for name in ("format.VERSION", "home.VERSION"):
        monkeypatch.setattr(f"penstock.kvstore.tiers.disk.{name}", 2)
    async with bench(tmp_path) as bed:
        assert bed.disk.has_blocks(keys(4)) == 0
        assert await bed.write(puts(2)) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "slab_slots": -1}', "x" * 100_000])
async def test_a_manifest_that_makes_no_sense_is_a_miss(tmp_path: Path, text: str) -> None:
    async with bench(tmp_path) as bed:
        await bed.write(puts(4))
        space = bed.spaces.home.space(spec())
    for manifest in (space / "manifest.json", tmp_path / "manifest.json"):
        manifest.write_text(text)
    async with bench(tmp_path) as bed:
        assert bed.disk.has_blocks(keys(4)) == 0
        assert await bed.write(puts(4)) == 4


async def test_a_corrupt_block_is_dropped_and_its_neighbours_are_not(tmp_path: Path) -> None:
    async with bench(tmp_path) as bed:
        await bed.write(puts(4))
        with slabs(tmp_path)[0].open("r+b") as file:
            file.seek(2 * SLOT + PAGE + 17)
            file.write(b"?")
        assert await bed.bring(keys(4)) == list(contents(4).values())[:2]
        assert bed.disk.has_blocks(keys(4)) == 2
        assert dropped(bed.stats()) == {"corrupt": 1}
        assert await bed.write(puts(4)) == 1, "computed again and written again"
        assert await bed.bring(keys(4)) == list(contents(4).values())


async def test_a_block_that_changed_in_memory_is_not_written(tmp_path: Path) -> None:
    async with bench(tmp_path) as bed:
        stored = bed.put(puts(2))
        views = [bed.arena.block(block.slot, BLOCK_BYTES) for block in stored]
        views[1][5] ^= 1
        with pytest.raises(Damaged) as caught:
            await bed.disk.write(list(zip(stored, views, strict=True)))
        assert caught.value.blocks == [stored[1]]
        assert bed.stats().used_bytes == 0
        del views


# -- a failing disk


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


async def test_many_readers_and_a_writer(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=48, host_slots=256, direct=True) as bed:
        await bed.write(puts(20))

        async def read(seed: int) -> None:
            names = keys(20)[: random.Random(seed).randrange(1, 20)]
            room = Room(bed.host, bed.arena, bed.now, lambda: None)
            await bed.disk.bring_blocks(names, room, bed.now() + 10)
            room.close()

        await asyncio.gather(*(read(seed) for seed in range(20)), bed.write(puts(30, "b")))
        assert bed.disk.has_blocks(keys(20)) + bed.disk.has_blocks(keys(30, "b")) <= 48
        for name in list(bed.host.keys()):
            block = bed.host.find(name)
            assert block is not None
            assert bytes(bed.arena.block(block.slot, BLOCK_BYTES)) == contents(20)[name]
        assert bed.host.stats().reserved == 0


# -- budgets and directories


async def test_the_days_allowance_outlives_the_process(tmp_path: Path) -> None:
    async with bench(tmp_path, per_day=3 * SLOT) as bed:
        assert await bed.write(puts(2)) == 2
        assert bed.spaces.condition.writes_wait_s(SLOT) == 0
        await bed.spaces.save(spec())
    async with bench(tmp_path, per_day=3 * SLOT) as bed:
        assert bed.stats().written_today == 2 * SLOT
        assert bed.spaces.condition.writes_wait_s(SLOT) == 0
        assert bed.spaces.condition.writes_wait_s(2 * SLOT) > 0


async def test_when_room_is_needed_the_spec_that_was_longest_unused_goes(tmp_path: Path) -> None:
    specs = [spec(model=f"{number:02}" * 32) for number in range(4)]
    for number, one in enumerate(specs[:3]):
        async with bench(tmp_path, block_spec=one, slots=16) as bed:
            await bed.write(puts(8))
        for manifest in bed.spaces.home.space(one).glob("manifest.json"):
            os.utime(manifest, (number, number))
        assert sum(path.stat().st_size for path in slabs(tmp_path)) <= 16 * SLOT
    assert len(slabs(tmp_path)) == 1, "each takes all the room"
    async with bench(tmp_path, block_spec=specs[2], slots=16) as bed:
        assert bed.disk.has_blocks(keys(8)) == 8
    async with bench(tmp_path, block_spec=specs[3], slots=32) as bed:
        await bed.write(puts(8))
    assert len(slabs(tmp_path)) == 1


async def test_a_smaller_size_than_before(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=16) as bed:
        await bed.write(puts(16))
    async with bench(tmp_path, slots=8) as bed:
        assert bed.disk.has_blocks(keys(16)) == 0
        assert await bed.write(puts(8)) == 8
    assert sum(path.stat().st_size for path in slabs(tmp_path)) <= 8 * SLOT


async def test_one_process_per_directory(tmp_path: Path) -> None:
    async with bench(tmp_path):
        with pytest.raises(ConfigError, match="another store uses it"):
            async with bench(tmp_path):
                pass


async def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        async with bench(tmp_path):
            pass
    os.chmod(tmp_path, 0o700)
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        async with bench(tmp_path):
            pass


async def test_files_are_ours_alone(tmp_path: Path) -> None:
    async with bench(tmp_path / "new") as bed:
        await bed.write(puts(2))
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


async def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    home = tmp_path / "home"
    async with bench(home) as bed:
        space = bed.spaces.home.space(spec())
    (space / "slab-000000.blocks").symlink_to(victim)
    async with bench(home) as bed:
        assert await bed.write(puts(2)) == 0
    assert victim.read_text() == "precious"


async def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    async with bench(tmp_path) as bed:
        await bed.write(puts(2))
        space = bed.spaces.home.space(spec())
    (tmp_path / "notes.txt").write_text("mine")
    (space / "notes.txt").write_text("mine")
    (space / "manifest.json").write_text("{}")
    async with bench(tmp_path) as bed:
        assert bed.disk.has_blocks(keys(2)) == 0
    assert (space / "notes.txt").read_text() == (tmp_path / "notes.txt").read_text() == "mine"


async def test_the_spec_in_use_changes(tmp_path: Path) -> None:
    with spaces_of(tmp_path, slots=512) as (spaces, clock):
        async with opened(spaces, clock, spec()) as bed:
            await bed.write(puts(2))
        async with opened(spaces, clock, spec(dtype="bfloat16")) as bed:
            assert bed.disk.has_blocks(keys(2)) == 0
        async with opened(spaces, clock, spec()) as bed:
            assert await bed.bring(keys(2)) == list(contents(2).values())


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


async def test_a_small_directory_that_may_grow_a_lot_is_cut_anew(tmp_path: Path) -> None:
    """Many small files would leave the store without descriptors for its clients."""
    async with bench(tmp_path, total=1 << 20) as bed:
        await bed.write(puts(3))
    async with bench(tmp_path, total=64 << 20) as bed:
        assert bed.disk.has_blocks(keys(3)) == 3, "as long as they are not too many"
    async with bench(tmp_path, total=4 << 30) as bed:
        await bed.write(puts(3))
        size = slabs(tmp_path)[0].stat().st_size
        assert (4 << 30) // size <= 512
        assert await bed.bring(keys(3)) == list(contents(3).values())
