"""What every device has to do; the modules that import these tests have the fixture `device`."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from penstock.kv.device.memory import HANDLE_BYTES, Device, DeviceFault

SIZE = 1 << 20
BLOCK = 12_345


def noise(number: int, size: int = BLOCK) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(size)))


def content(view: object) -> bytes:
    """The bytes of a device view."""
    return bytes(torch.from_dlpack(view).cpu().numpy())


def test_what_went_up_comes_down(device: Device) -> None:
    arena = device.allocate(SIZE)
    blocks = [noise(number) for number in range(16)]
    places = [number * 20_000 + number for number in range(16)]
    arena.upload(list(zip(places, blocks, strict=True))).wait()
    back = [memoryview(bytearray(BLOCK)) for _ in blocks]
    transfer = arena.download(list(zip(places, back, strict=True)))
    transfer.wait()
    assert transfer.done()
    assert back == blocks
    arena.close()


def test_one_direction_keeps_its_order(device: Device) -> None:
    arena = device.allocate(SIZE)
    blocks = [noise(number) for number in range(30)]
    transfers = [arena.upload([(100, block)]) for block in blocks]
    transfers[-1].wait()
    assert all(transfer.done() for transfer in transfers)
    back = memoryview(bytearray(BLOCK))
    arena.download([(100, back)]).wait()
    assert back == blocks[-1]
    arena.close()


def test_a_whole_arena_in_one_copy(device: Device) -> None:
    arena = device.allocate(SIZE)
    whole, back = noise(1, SIZE), memoryview(bytearray(SIZE))
    arena.upload([(0, whole)]).wait()
    arena.download([(0, back)]).wait()
    assert back == whole
    arena.upload([]).wait()
    arena.close()


@pytest.mark.parametrize(
    ("offset", "host"),
    [
        (-1, bytearray(1)),
        (SIZE, bytearray(1)),
        (SIZE - 9, bytearray(10)),
        (0, bytearray(SIZE + 1)),
        (0, b"12345"),
        (0, bytearray()),
    ],
    ids=["before", "behind", "across", "too-large", "read-only", "empty"],
)
def test_copies_that_can_not_be(device: Device, offset: int, host: bytearray) -> None:
    arena = device.allocate(SIZE)
    for copy in (arena.upload, arena.download):
        with pytest.raises(ValueError, match=r"outside of an arena|writable"):
            copy([(0, memoryview(bytearray(8))), (offset, memoryview(host))])
    with pytest.raises(ValueError, match="writable, contiguous"):
        arena.upload([(0, memoryview(bytearray(8))[::2])])
    arena.close()


def test_memory_is_taken_and_given_back(device: Device) -> None:
    before = device.free_bytes()
    size = 64 << 20
    arena = device.allocate(size)
    assert before - device.free_bytes() >= size
    with pytest.raises(DeviceFault, match=r"asked for, \d+ are free") as caught:
        device.allocate(device.info.total_bytes)
    assert not caught.value.lost
    arena.close()
    gc.collect()
    assert device.free_bytes() > before - size


def test_a_view_is_the_memory_itself(device: Device) -> None:
    arena = device.allocate(SIZE)
    block = noise(1)
    view = arena.view(5000, BLOCK)
    assert view.nbytes == BLOCK
    tensor = torch.from_dlpack(view)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (BLOCK,))
    arena.upload([(5000, block)]).wait()
    assert bytes(tensor.cpu().numpy()) == block, "seen through a tensor that was there before"
    for wrong in [(-1, 5), (SIZE - 4, 5), (0, SIZE + 1)]:
        with pytest.raises(ValueError, match="outside of an arena"):
            arena.view(*wrong)
    arena.close()
    assert bytes(tensor.cpu().numpy()) == block, "the tensor keeps the memory"


@pytest.mark.parametrize("how", ["registered", "pinned"])
def test_pinned_host_memory_is_copied_alike(device: Device, how: str) -> None:
    arena = device.allocate(SIZE)
    memory = arena.pinned(3 * BLOCK) if how == "pinned" else memoryview(bytearray(3 * BLOCK))
    assert memory.nbytes == 3 * BLOCK and memory.format == "B"
    if how == "registered":
        assert arena.register(memory) in (True, False)
    memory[:] = noise(3, 3 * BLOCK)
    arena.upload([(0, memory[BLOCK : 2 * BLOCK])]).wait()
    arena.download([(0, memory[:BLOCK])]).wait()
    assert memory[:BLOCK] == noise(3, 3 * BLOCK)[BLOCK : 2 * BLOCK]
    arena.close()


@pytest.mark.parametrize("handle", [b"", bytes(HANDLE_BYTES), b"\xff" * HANDLE_BYTES])
def test_a_handle_of_nothing(device: Device, handle: bytes) -> None:
    with pytest.raises((DeviceFault, ValueError)):
        device.open(handle, SIZE)
    assert device.free_bytes() > 0, "the device is as good as before"
