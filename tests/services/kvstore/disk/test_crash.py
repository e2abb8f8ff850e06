"""A store that is killed at any byte of its writes: after the restart a block is whole and right, or absent."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.services.kvstore.disk.disks import SLOT, CutFiles, Killed, bench, contents, slabs
from tests.services.kvstore.helpers import ROOT, puts

from penstock.kv.client.client import BlockPut

SLOTS = 6
CHAINS = ("a", "b", "c")


async def write_until_killed(path: Path, left: int) -> bool:
    """Fills the disk three times over, so that slots are overwritten; whether it came to the end."""
    async with bench(path, CutFiles(left), slots=SLOTS) as bed:
        try:
            for chain in CHAINS:
                await bed.write(puts(SLOTS, chain))
        except Killed:
            return False
    return True


async def whole_and_right(path: Path) -> int:
    """Reads everything that the tier says it has; returns how many blocks that is."""
    count = 0
    async with bench(path, slots=SLOTS) as bed:
        for chain in CHAINS:
            for name, data in contents(SLOTS, chain).items():
                if bed.disk.has_blocks([name]):
                    assert await bed.bring([name]) == [data]
                    count += 1
        stats = bed.stats()
        assert stats.corrupt == 0, "what is listed is whole: nothing had to be found out by its checksum"
        assert stats.blocks == count
    return count


async def test_killed_at_any_byte_of_any_write(tmp_path: Path) -> None:
    total = 3 * SLOTS * SLOT + 3 * SLOTS * 4096
    interesting = random.Random(1).sample(range(total), 150)
    edges = [number * 4096 + more for number in range(total // 4096) for more in (0, 1)]
    survived = set()
    for number, left in enumerate([*interesting, *edges]):
        path = tmp_path / str(number)
        assert await write_until_killed(path, left) == (left >= total)
        survived.add(await whole_and_right(path))
    assert survived >= set(range(SLOTS + 1)), "every number of blocks was left by some cut"


async def test_a_slot_is_never_whole_while_it_changes_hands(tmp_path: Path) -> None:
    """Cut in the middle of the second block's bytes: the slot of the first is empty, not half of each."""
    async with bench(tmp_path, slots=1) as bed:
        await bed.write(puts(1))
    async with bench(tmp_path, CutFiles(4096 + 2048), slots=1) as bed:
        with pytest.raises(Killed):
            await bed.write(puts(1, "b"))
    async with bench(tmp_path, slots=1) as bed:
        stats = bed.stats()
        assert (stats.blocks, stats.torn, stats.corrupt) == (0, 0, 0)


async def test_power_lost_before_the_block_but_after_its_header(tmp_path: Path) -> None:
    """The disk may keep the later write and lose the earlier one: the checksum of the block finds out."""
    async with bench(tmp_path, slots=1) as bed:
        await bed.write(puts(1))
    with slabs(tmp_path)[0].open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(512))
    async with bench(tmp_path, slots=1) as bed:
        assert bed.disk.has_blocks([puts(1)[0].key]) == 1
        assert await bed.bring([puts(1)[0].key]) == []
        assert bed.disk.has_blocks([puts(1)[0].key]) == 0
        assert bed.stats().corrupt == 1
    async with bench(tmp_path, slots=1) as bed:
        assert bed.disk.has_blocks([puts(1)[0].key]) == 0, "it is gone for good"


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.services.kvstore.helpers import puts
from tests.services.kvstore.disk.disks import bench

async def main(path):
    async with bench(Path(path), slots=16, direct=True) as bed:
        print("writing", flush=True)
        while True:
            for chain in "abcdefgh":
                await bed.write(puts(12, chain))

asyncio.run(main(sys.argv[1]))
"""


def write_and_be_killed(path: Path, seconds: float) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert any(line == "writing\n" for line in child.stdout)
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        child.send_signal(signal.SIGKILL)


@pytest.mark.mesh
async def test_killed_processes(tmp_path: Path) -> None:
    moments, found = random.Random(2), 0
    for _ in range(12):
        await asyncio.to_thread(write_and_be_killed, tmp_path, moments.uniform(0.0, 0.15))
        async with bench(tmp_path, slots=16) as bed:
            for chain in "abcdefgh":
                for name, data in contents(12, chain).items():
                    if bed.disk.has_blocks([name]):
                        assert await bed.bring([name]) == [data]
                        found += 1
            assert bed.stats().corrupt == 0
    assert found > 12


async def test_the_later_writing_of_a_block_counts(tmp_path: Path) -> None:
    """Evicted from one slot and written into another, the first not overwritten yet."""
    first = BlockPut(puts(1)[0].key, ROOT, 0, puts(1)[0].data)
    async with bench(tmp_path, slots=4) as bed:
        await bed.write([first])
        await bed.write(puts(1, "b"))
    data = slabs(tmp_path)[0].read_bytes()
    with slabs(tmp_path)[0].open("r+b") as file:  # the slot of b is a copy of that of a now
        file.seek(SLOT)
        file.write(data[:SLOT])
    async with bench(tmp_path, slots=4) as bed:
        stats = bed.stats()
        assert (stats.blocks, stats.stale) == (1, 1)
        assert await bed.bring([first.key]) == [bytes(first.data)]
