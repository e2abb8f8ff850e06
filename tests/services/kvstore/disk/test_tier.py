"""The blocks of the disk by themselves: what is kept, and what damage does to it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.services.kvstore.disk.disks import SLOT, bench, contents, opened, slabs, spaces_of
from tests.services.kvstore.helpers import BLOCK_BYTES, keys, puts, spec

from penstock.kvstore.tiers.base import Room
from penstock.kvstore.tiers.disk.format import PAGE, Drop
from penstock.kvstore.tiers.disk.space import Damaged
from penstock.kvstore.tiers.disk.stats import NvmeStats


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


async def test_the_event_loop_starts_no_thread_of_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait until the thread runs: on a busy machine for long."""
    starters: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if thread.name.startswith("penstock-nvme"):
            starters.append(threading.current_thread())
        start(thread)

    with spaces_of(tmp_path) as (spaces, clock):
        monkeypatch.setattr(threading.Thread, "start", noted)
        async with opened(spaces, clock, spec()) as bed:
            await bed.write(puts(20))
            assert len(await bed.bring(keys(20))) == 20
    assert starters and threading.current_thread() not in starters


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
