"""A CUDA device: the contract of every device, and what only a real one can show."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from tests.gpu.kv.bandwidth import bandwidth
from tests.libs.kv.device_contract import *  # noqa: F403
from tests.libs.kv.device_contract import BLOCK, SIZE, noise

from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.device.cuda import CudaDevice, open_cuda
from penstock.kv.device.memory import DeviceFault


@pytest.fixture
def device() -> CudaDevice:
    return open_cuda()


def test_a_view_is_a_tensor_on_the_device(device: CudaDevice) -> None:
    arena = device.allocate(SIZE)
    arena.upload([(512, noise(1))]).wait()
    tensor = torch.from_dlpack(arena.view(512, BLOCK))
    assert tensor.device == torch.device("cuda", 0)
    floats = torch.from_dlpack(arena.view(512, 4096)).view(torch.bfloat16)
    assert floats.shape == (2048,)
    tensor.fill_(7)
    torch.cuda.synchronize()
    back = memoryview(bytearray(BLOCK))
    arena.download([(512, back)]).wait()
    assert back == bytes([7]) * BLOCK, "written by torch, seen by the arena"
    arena.close()


def test_the_memory_of_a_store_can_be_registered(device: CudaDevice) -> None:
    host = Arena(32 << 20)
    host.format(Layout.fit(host.size, 1 << 20))
    arena = device.allocate(8 << 20)
    assert arena.register(host.whole()), "a memfd can be pinned here"
    slot = host.block(3, 1 << 20)
    slot[:] = noise(1, 1 << 20)
    arena.upload([(1 << 20, slot)]).wait()
    slot[:] = bytes(1 << 20)
    arena.download([(1 << 20, slot)]).wait()
    assert slot == noise(1, 1 << 20)
    slot.release()
    arena.close()
    host.close()


def test_another_process_reads_and_writes_the_same_memory(device: CudaDevice) -> None:
    arena = device.allocate(SIZE)
    arena.upload([(4096, noise(1))]).wait()
    program = (
        "import sys, hashlib, torch\n"
        "from penstock.kv.device.cuda import open_cuda\n"
        "device = open_cuda()\n"
        "opened = device.open(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))\n"
        "tensor = torch.from_dlpack(opened.view(4096, int(sys.argv[3])))\n"
        "print(device.info.uuid, hashlib.sha256(bytes(tensor.cpu().numpy())).hexdigest())\n"
        "tensor.fill_(9)\n"
        "torch.cuda.synchronize()\n"
        "del tensor\n"
        "opened.close()\n"
    )
    command = [sys.executable, "-c", program, arena.handle.hex(), str(SIZE), str(BLOCK)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert done.stdout.split() == [device.info.uuid, hashlib.sha256(noise(1)).hexdigest()]
    back = memoryview(bytearray(BLOCK))
    arena.download([(4096, back)]).wait()
    assert back == bytes([9]) * BLOCK
    arena.close()


def test_too_much_is_refused_and_the_device_is_as_good_as_before(device: CudaDevice) -> None:
    with pytest.raises(DeviceFault, match="are free") as caught:
        device.allocate(device.info.total_bytes * 2)
    assert not caught.value.lost
    device.allocate(SIZE).close()


def test_bandwidth_is_reported(device: CudaDevice, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bandwidth(device, blocks=64, block_bytes=1 << 20)
    with capsys.disabled():
        print("\n" + "\n".join(f"{name}: {value:.1f} GB/s" for name, value in figures.items()))
    assert all(value > 0 for value in figures.values())
