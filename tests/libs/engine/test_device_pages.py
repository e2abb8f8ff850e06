"""An engine on the store's device copies blocks from there into its pages."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.libs.kv.device_contract import noise

from penstock.checkpoint import inspect
from penstock.engine.step.memory import DeviceMemory, PageMemory
from penstock.kv.device.memory import Device
from penstock.testing.checkpoints import TINY_LLAMA_4, TinyModel, write_checkpoint
from penstock.testing.twin import TwinDevice


def copies_both_kinds(device: Device, place: str, directory: Path, own: DeviceMemory | None = None) -> None:
    """Blocks on the device and, behind them, blocks in host memory."""
    config = inspect(write_checkpoint(directory / "model", TinyModel())).config
    memory = PageMemory(config, 8, 16, torch.bfloat16, torch.device(place), memory=own)
    size = memory.block_bytes
    arena = device.allocate(4 * size)
    arena.upload([(0, noise(1, size)), (2 * size, noise(2, size))]).wait()
    blocks = [arena.view(0, size), arena.view(2 * size, size), noise(3, size), noise(4, size)]
    seen: list[int] = []

    def copy(index: int, into: memoryview) -> bool:
        seen.append(index)
        into[:] = blocks[index]
        return index == 2

    assert memory.write([5, 1, 3, 4], blocks, copy) == 3
    assert [memory.view(page) for page in (5, 1, 3)] == [noise(number, size) for number in (1, 2, 3)]
    assert seen == [2, 3], "those on the device are copied there"
    assert memory.write([2], blocks[1:2], copy) == 1
    assert memory.view(2) == noise(2, size)
    arena.close()


def test_pages_from_a_twin(tmp_path: Path) -> None:
    copies_both_kinds(TwinDevice(), "cpu", tmp_path)


def test_nothing_of_another_tenant_is_left_beside_a_far_part(tmp_path: Path) -> None:
    config = inspect(write_checkpoint(tmp_path / "model", TINY_LLAMA_4)).config
    memory = PageMemory(config, 8, 16, torch.bfloat16, torch.device("cpu"))
    size, parts = memory.block_bytes, memory.parts
    assert parts is not None and parts.far == ((3 * size // 4, size),)
    before, block = noise(1, size), noise(2, size)
    memory.write([1, 2], [before, before])

    def copy(index: int, into: memoryview) -> bool:
        begin = 3 * size // 4 if index == 0 else 0
        into[begin:] = block[begin:]
        return True

    assert memory.write([1, 2], [block, block], copy, far=1) == 2
    assert memory.view(1) == bytes(3 * size // 4) + bytes(block[3 * size // 4 :])
    assert memory.view(2) == block
