"""The parts of `penstock bench kv` that can be right or wrong without a clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.bench.kv import files
from penstock.bench.kv.blocks import ROOT, names, puts
from penstock.bench.kv.bulk import open_bulk
from penstock.bench.kv.calls import Callers
from penstock.bench.kv.files import PlainFile
from penstock.bench.kv.memory import CUT_BYTES, Region, copy_all


@pytest.mark.parametrize("size", [4096, CUT_BYTES, 2 * CUT_BYTES + 4096])
def test_a_plain_copy_copies_everything(size: int) -> None:
    source, target = Region(size), Region(size)
    source.touch(7)
    assert copy_all(target, source) > 0
    assert target.view == source.view
    assert sum(block.nbytes for block in target.blocks(4096)) == size


def test_blocks_form_a_chain() -> None:
    keys, data = names(5, "a"), Region(8192).blocks(4096)
    blocks = puts(keys, data)
    assert [block.parent for block in blocks] == [ROOT, *keys[:-1]]
    assert len(set(keys) | set(names(5, "b"))) == 10
    assert all(block.data.nbytes == 4096 for block in blocks)


async def test_every_client_calls_and_one_calls_alone() -> None:
    calls = [0, 0, 0]

    def caller(number: int):
        async def call() -> None:
            calls[number] += 1
            await asyncio.sleep(0)

        return call

    found = await Callers([caller(0), caller(1), caller(2)], [], 40).empty(0)
    assert calls == [40 + 10, 10, 10]
    assert found.p99 > 0 < found.p50 and found.rate > 0


async def test_a_plain_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, places = 3 * files._CALL_BYTES, []
    file = PlainFile(tmp_path / "file", size, direct=False)
    read = files._read

    def seen(fd: int, buffer: memoryview, at: int) -> int:
        places.append(at)
        return read(fd, buffer, at)

    monkeypatch.setattr(files, "_read", seen)
    try:
        assert await file.read(0) > 0
        assert sorted(places) == list(range(0, size, files._CALL_BYTES))
        places.clear()
        assert await file.read_singly(0) > 0
        assert places == list(range(0, size, files._CALL_BYTES))
        assert await file.write(0) > 0
        assert (tmp_path / "file").stat().st_size == size
    finally:
        file.close()


@pytest.mark.parametrize("seals", [False, True])
async def test_all_blocks_of_a_round_are_stored_and_come_back(seals):
    """Small ones too, of which a round has more than a client may reserve in a small store; round after round."""
    async with open_bulk(16 << 20, 4 << 10, seals=seals) as bulk:
        for number in range(2):
            assert await bulk.put(number) > 0
            assert await bulk.get(number) > 0
            assert await bulk.get_remote(number) > 0
