"""The twin: a device in every respect, and one that a test can slow down and break."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.libs.kv.device_contract import *  # noqa: F403
from tests.libs.kv.device_contract import BLOCK, SIZE, content, noise

from penstock.kv.device.memory import DeviceFault, NoDevice
from penstock.testing.twin import TwinDevice


@pytest.fixture
def device() -> TwinDevice:
    return TwinDevice()


def until(condition: Callable[[], bool]) -> None:
    """Other threads go on until `condition` holds."""
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_there_is_one_twin() -> None:
    with pytest.raises(NoDevice, match="no device 1; 1 is visible, the first is 0"):
        TwinDevice(1)


def test_a_copy_happens_when_its_turn_comes(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    device.switch.hold()
    host = noise(1)
    first = arena.upload([(0, host)])
    until(device.switch.stalled)
    assert not first.done()
    assert content(arena.view(0, BLOCK)) == bytes(BLOCK), "nothing there yet"
    host[:] = noise(2)
    device.switch.release()
    first.wait()
    assert content(arena.view(0, BLOCK)) == noise(2), "what the memory held when the copy was made"
    arena.close()


def test_half_a_copy_can_be_seen(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    device.switch.piece_bytes = 1000
    device.switch.hold(after=3)
    transfer = arena.upload([(0, noise(1))])
    until(device.switch.stalled)
    assert content(arena.view(0, BLOCK)) == bytes(noise(1)[:3000]) + bytes(BLOCK - 3000)
    device.switch.release()
    transfer.wait()
    assert content(arena.view(0, BLOCK)) == noise(1)
    arena.close()


def test_the_two_directions_race(device: TwinDevice) -> None:
    """A download does not wait for an upload that was submitted before it."""
    arena = device.allocate(SIZE)
    device.switch.hold()
    up = arena.upload([(0, noise(1))])
    until(device.switch.stalled)
    down = arena.download([(0, memoryview(bytearray(BLOCK)))])
    until(lambda: device.switch.stalled(2))
    device.switch.release()
    up.wait()
    down.wait()
    arena.close()


def test_a_failed_copy_changes_nothing(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    arena.upload([(0, noise(1))]).wait()
    device.switch.fail()
    failed = arena.upload([(0, noise(2))])
    with pytest.raises(DeviceFault, match="the copy failed") as caught:
        failed.wait()
    assert not caught.value.lost
    with pytest.raises(DeviceFault):
        failed.done()
    assert content(arena.view(0, BLOCK)) == noise(1)
    arena.upload([(0, noise(3))]).wait()
    assert content(arena.view(0, BLOCK)) == noise(3)
    arena.close()


def test_a_bit_can_flip_on_the_way(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    device.switch.flip()
    arena.upload([(0, noise(1))]).wait()
    wrong = content(arena.view(0, BLOCK))
    assert sum(one != other for one, other in zip(wrong, noise(1), strict=True)) == 1
    arena.close()


def test_a_lost_device_stays_lost(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    device.switch.hold()
    under_way = arena.upload([(0, noise(1))])
    until(device.switch.stalled)
    device.switch.lose()
    device.switch.release()
    calls: list[Callable[[], object]] = [
        under_way.wait,
        lambda: arena.download([(0, noise(1))]),
        device.free_bytes,
        lambda: device.open(arena.handle, SIZE),
    ]
    for call in calls:
        with pytest.raises(DeviceFault, match="lost") as caught:
            call()
        assert caught.value.lost
    arena.close()


def test_another_process_sees_the_same_memory(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    arena.upload([(777, noise(1))]).wait()
    program = (
        "import sys, hashlib, numpy\n"
        "from penstock.testing.twin import TwinDevice\n"
        "opened = TwinDevice().open(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))\n"
        "view = opened.view(777, int(sys.argv[3]))\n"
        "opened.close()\n"
        "print(bytes(numpy.from_dlpack(view)[:8]).hex())\n"
    )
    arguments = [arena.handle.hex(), str(SIZE), str(BLOCK)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == noise(1)[:8].hex()
    arena.close()


def test_a_handle_of_an_arena_that_is_gone(device: TwinDevice) -> None:
    arena = device.allocate(SIZE)
    opened = TwinDevice().open(arena.handle, SIZE)
    arena.upload([(0, noise(1))]).wait()
    arena.close()
    assert content(opened.view(0, BLOCK)) == noise(1), "what is open stays"
    opened.close()
    with pytest.raises(DeviceFault):
        device.open(arena.handle, SIZE)
    other = device.allocate(SIZE)
    with pytest.raises(DeviceFault, match=r"gone|opened"):
        device.open(arena.handle, SIZE)
    with pytest.raises(DeviceFault, match="not the handle"):
        device.open(other.handle, SIZE + 1)
    other.close()
