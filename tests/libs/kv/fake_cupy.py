"""A stand-in for the part of cupy that `penstock.kv.device.cuda` calls, on host memory.

The names, the arguments and their order are those of cupy 14. Streams are threads, so that copies are late here too.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy

TOTAL = 1 << 30


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError{status}")


class Fake:
    """A module with one device."""

    def __init__(self, devices: int = 1) -> None:
        self.allocated: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.opened: list[int] = []
        self.fail: dict[str, int] = {}
        """Name of a runtime function to the status with which it ends."""
        self.calls: list[str] = []
        self._devices = devices
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}
        self._events: dict[int, threading.Event] = {}
        self.gate = threading.Event()
        self.gate.set()
        names = [name for name in dir(self) if name.startswith("rt_")]
        runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, memcpyHostToDevice=1, memcpyDeviceToHost=2)
        for name in names:
            setattr(runtime, name[3:], self._guarded(name[3:], getattr(self, name)))
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Stream=self._stream,
            Event=self._event,
            UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr, size=size, owner=owner),
            MemoryPointer=lambda memory, offset: SimpleNamespace(memory=memory, ptr=memory.ptr + offset),
            alloc_pinned_memory=lambda size: bytearray(size + 17),
        )

    def _guarded(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.fail:
                raise CUDARuntimeError(self.fail[name])
            return function(*arguments)

        return call

    def ndarray(self, shape: tuple[int], dtype: str, memptr: Any) -> Any:
        assert dtype == "uint8"
        block = (ctypes.c_char * shape[0]).from_address(memptr.ptr)
        block.owner = memptr.memory.owner
        return numpy.frombuffer(block, numpy.uint8)

    # -- streams and events

    def _stream(self, *, non_blocking: bool) -> Any:
        assert non_blocking
        work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        number = len(self._queues) + 1
        self._queues[number] = work

        def run() -> None:
            while True:
                job = work.get()
                self.gate.wait()
                job()

        threading.Thread(target=run, daemon=True).start()
        return SimpleNamespace(ptr=number)

    def _event(self, *, block: bool, disable_timing: bool) -> Any:
        assert block and disable_timing
        happened = threading.Event()
        number = len(self._events) + 1
        self._events[number] = happened

        def synchronize() -> None:
            happened.wait()
            if "eventSynchronize" in self.fail:
                raise CUDARuntimeError(self.fail["eventSynchronize"])

        return SimpleNamespace(
            ptr=number, synchronize=synchronize, record=lambda stream: self._queues[stream.ptr].put(happened.set)
        )

    def rt_eventQuery(self, event: int) -> int:
        return 0 if self._events[event].is_set() else 600

    def rt_streamSynchronize(self, stream: int) -> None:
        passed = threading.Event()
        self._queues[stream].put(passed.set)
        passed.wait()

    def rt_memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        on_device = target if kind == 1 else source
        assert any(start <= on_device and on_device + size <= start + len(b) for start, b in self.allocated.items())
        self._queues[stream].put(lambda: ctypes.memmove(target, source, size))

    # -- devices and memory

    def rt_getDeviceCount(self) -> int:
        return self._devices

    def rt_setDevice(self, index: int) -> None:
        assert index < self._devices

    def rt_getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"uuid": b"\x01\xfe", "name": b"Fake"}

    def rt_deviceGetPCIBusId(self, index: int) -> str:
        return f"0000:0{index}:00.0"

    def rt_memGetInfo(self) -> tuple[int, int]:
        return TOTAL - sum(len(block) for block in self.allocated.values()), TOTAL

    def rt_malloc(self, size: int) -> int:
        if size > self.rt_memGetInfo()[0]:
            raise CUDARuntimeError(2)
        block = ctypes.create_string_buffer(size)
        self.allocated[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def rt_free(self, pointer: int) -> None:
        for stream in self._queues:  # cudaFree waits for the device
            self.rt_streamSynchronize(stream)
        del self.allocated[pointer]

    def rt_ipcGetMemHandle(self, pointer: int) -> bytes:
        return b"fake" + pointer.to_bytes(8, "little") + bytes(52)

    def rt_ipcOpenMemHandle(self, handle: bytes) -> int:
        pointer = int.from_bytes(handle[4:12], "little")
        if handle[:4] != b"fake" or pointer not in self.allocated:
            raise CUDARuntimeError(400)
        self.opened.append(pointer)
        return pointer

    def rt_ipcCloseMemHandle(self, pointer: int) -> None:
        self.opened.remove(pointer)

    def rt_hostRegister(self, address: int, size: int, flags: int) -> None:
        self.registered[address] = size

    def rt_hostUnregister(self, address: int) -> None:
        del self.registered[address]
