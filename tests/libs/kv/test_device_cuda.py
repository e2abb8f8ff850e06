"""The CUDA device, against a stand-in for cupy; tests/gpu has the same contract on a real one."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from tests.libs.kv.device_contract import *  # noqa: F403
from tests.libs.kv.device_contract import BLOCK, SIZE, content, noise
from tests.libs.kv.fake_cupy import Fake

from penstock.kv.device.cuda import CudaDevice, open_cuda
from penstock.kv.device.memory import DeviceFault, NoDevice


@pytest.fixture
def cupy() -> Fake:
    return Fake()


@pytest.fixture
def device(cupy: Fake) -> CudaDevice:
    return open_cuda(0, cupy)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDevice, match="no CUDA device is visible; see CUDA_VISIBLE_DEVICES"):
        open_cuda(0, Fake(devices=0))
    with pytest.raises(NoDevice, match="no CUDA device 2; 2 are visible, the first is 0"):
        open_cuda(2, Fake(devices=2))
    old_driver = Fake()
    old_driver.fail["getDeviceCount"] = 35
    with pytest.raises(NoDevice, match=r"no CUDA device answers \(cudaError35\); install penstock\[cuda13\]"):
        open_cuda(0, old_driver)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NoDevice, match=r"cupy can't be imported .* install penstock\[cuda13\], or penstock\[cuda12\]"):
        open_cuda(0)


def test_a_device_has_one_name_in_every_process(device: CudaDevice) -> None:
    assert (device.info.uuid, device.info.name) == ("01fe@0000:00:00.0", "Fake")


def test_an_event_is_not_done_before_its_copies(cupy: Fake, device: CudaDevice) -> None:
    arena = device.allocate(SIZE)
    cupy.gate.clear()
    transfer = arena.upload([(0, noise(1))])
    gc.collect()
    assert not transfer.done()
    assert content(arena.view(0, BLOCK)) == bytes(BLOCK)
    cupy.gate.set()
    transfer.wait()
    assert content(arena.view(0, BLOCK)) == noise(1), "the transfer kept its host memory alive"


def test_a_forgotten_transfer_still_has_its_memory(cupy: Fake, device: CudaDevice) -> None:
    arena = device.allocate(SIZE)
    cupy.gate.clear()
    host = noise(1)
    seen = weakref.ref(host)
    arena.upload([(0, host)])
    del host
    gc.collect()
    assert seen() is not None
    cupy.gate.set()
    arena.upload([(BLOCK, noise(2))]).wait()
    arena.upload([(BLOCK, noise(2))]).wait()
    gc.collect()
    assert seen() is None
    assert content(arena.view(0, BLOCK)) == noise(1)


def test_another_process_opens_and_lets_go(cupy: Fake, device: CudaDevice) -> None:
    arena = device.allocate(SIZE)
    arena.upload([(64, noise(1))]).wait()
    opened = open_cuda(0, cupy).open(arena.handle, SIZE)
    tensor = torch.from_dlpack(opened.view(64, BLOCK))
    opened.close()
    gc.collect()
    assert bytes(tensor.numpy()) == noise(1)
    assert len(cupy.opened) == 1, "a tensor keeps the mapping"
    del tensor
    gc.collect()
    assert cupy.opened == []
    with pytest.raises(DeviceFault, match="closed"):
        opened.view(0, 1)


def test_closing_gives_everything_back(cupy: Fake, device: CudaDevice) -> None:
    arena = device.allocate(SIZE)
    host = memoryview(bytearray(1 << 16))
    assert arena.register(host)
    assert cupy.registered
    arena.upload([(0, noise(1))])
    arena.close()
    gc.collect()
    assert not cupy.allocated and not cupy.registered
    assert cupy.calls.count("streamSynchronize") == 2, "no copy is under way when memory is freed"


def test_memory_that_can_not_be_pinned_is_used_as_it_is(cupy: Fake, device: CudaDevice) -> None:
    cupy.fail["hostRegister"] = 304
    arena = device.allocate(SIZE)
    assert not arena.register(noise(1))
    arena.upload([(0, noise(1))]).wait()
    assert content(arena.view(0, BLOCK)) == noise(1)


@pytest.mark.parametrize(("status", "lost"), [(1, False), (700, True), (719, True)])
@pytest.mark.parametrize("step", ["memcpyAsync", "eventSynchronize", "eventQuery", "setDevice"])
def test_errors_become_faults(cupy: Fake, device: CudaDevice, step: str, status: int, lost: bool) -> None:
    arena = device.allocate(SIZE)
    cupy.fail[step] = status
    with pytest.raises(DeviceFault, match=f"CUDA device 0: cudaError{status}") as caught:
        arena.upload([(0, noise(1)), (BLOCK, noise(2))]).wait()
    assert caught.value.lost == lost


def test_a_fault_that_is_polled_for(cupy: Fake, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = device.allocate(SIZE)
    transfer = arena.upload([(0, noise(1))])
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 719)
    with pytest.raises(DeviceFault, match="cudaError719"):
        transfer.done()
