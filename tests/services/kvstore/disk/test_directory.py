"""The directory of the disk tier: whose it is, what may lie in it, and how much may be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.services.kvstore.disk.disks import SLOT, bench, contents, opened, slabs, spaces_of
from tests.services.kvstore.helpers import keys, puts, spec

from penstock.runtime.config import ConfigError


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


async def test_slabs_without_a_manifest_hold_nobody_up(tmp_path: Path) -> None:
    """As a kill leaves them in the middle of a removal: they are the first to go."""
    gone, other = spec(model="01" * 32), spec(model="02" * 32)
    async with bench(tmp_path, block_spec=gone, slots=16) as bed:
        await bed.write(puts(8))
        manifest = bed.spaces.home.space(gone) / "manifest.json"
    manifest.unlink()
    async with bench(tmp_path, block_spec=other, slots=16) as bed:
        assert await bed.write(puts(16)) == 16
    assert all(path.parent != manifest.parent for path in slabs(tmp_path))
