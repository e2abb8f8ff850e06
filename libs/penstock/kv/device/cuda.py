"""A CUDA device, through cupy: memory, streams, events and IPC, and no arithmetic, which would need a compiler.

`import cupy` succeeds without any GPU, so what decides is whether a device answers; and it is one name for the
distributions cupy-cuda12x and cupy-cuda13x. Nothing here runs before `open_cuda` is called.

One arena is one cudaMalloc, so its IPC handle leads to its first byte. Host memory that was registered is copied
from and to in the background; other host memory goes through buffers of the driver, and the call returns when the
host memory is free again, so both are right and only the former is fast. A copy must not touch registered and
unregistered memory at once: register an arena whole, or not at all.

The tests run this file against a stand-in for cupy's runtime; on a real device it is tests/gpu/kv that runs it, as it
did on an H100.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from penstock.kv.device.memory import HANDLE_BYTES, Copy, DeviceFault, DeviceInfo, NoDevice, check_copy, check_range

_NOT_READY = 600
_HARMLESS = frozenset([1, 2, 101, 201, 205, 208, 210, 217, 304, 400, 711, 712, 713, 800, 801])
"""Errors of one call: bad value, no memory, wrong device, context or handle, map and register failures, not allowed.
After any other one the device has to be taken as lost: CUDA's execution errors stay until the process ends."""
_PORTABLE = 1
_INSTALL = "install penstock[cuda13], or penstock[cuda12] for a CUDA 12 driver"


def open_cuda(index: int = 0, cupy: Any = None) -> CudaDevice:
    """Device `index` of this process. Raises NoDevice that says what is missing. `cupy` is for tests."""
    module = cupy or _import_cupy()
    error_type = module.cuda.runtime.CUDARuntimeError
    try:
        count = int(module.cuda.runtime.getDeviceCount())
    except error_type as error:
        raise NoDevice(f"no CUDA device answers ({error}); {_INSTALL}, on a host with an NVIDIA driver") from error
    if count == 0:
        raise NoDevice("no CUDA device is visible; see CUDA_VISIBLE_DEVICES and the container's settings")
    if not 0 <= index < count:
        raise NoDevice(f"there is no CUDA device {index}; {count} are visible, the first is 0")
    return CudaDevice(module, index)


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NoDevice(f"cupy can't be imported ({error}); {_INSTALL}") from error
    return cupy


class CudaDevice:
    """A CUDA device as this process reaches it. Made by `open_cuda`; every method may be called from any thread."""

    def __init__(self, cupy: Any, index: int) -> None:
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        self.index = index
        with self.current():
            properties = self.runtime.getDeviceProperties(index)
            bus = self.runtime.deviceGetPCIBusId(index)
            total = int(self.runtime.memGetInfo()[1])
        # cupy ends the uuid at its first zero byte; with the place on the bus it names a device all the same
        uuid = f"{bytes(properties['uuid']).hex()}@{bus}".lower()
        self.info = DeviceInfo(index, uuid, bytes(properties["name"]).decode(errors="replace"), total)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes this the calling thread's device, and turns CUDA's errors into DeviceFault."""
        try:
            self.runtime.setDevice(self.index)
            yield
        except self.runtime.CUDARuntimeError as error:
            raise self.fault(error) from error

    def fault(self, error: Any) -> DeviceFault:
        """A CUDARuntimeError in our words."""
        return DeviceFault(f"CUDA device {self.index}: {error}", lost=error.status not in _HARMLESS)

    def free_bytes(self) -> int:
        """Asks the driver how many bytes are free now. Raises DeviceFault."""
        with self.current():
            return int(self.runtime.memGetInfo()[0])

    def allocate(self, size: int) -> CudaArena:
        """Allocates `size` bytes with one cudaMalloc; the caller closes the arena. Raises DeviceFault."""
        return CudaArena(self, size)

    def open(self, handle: bytes, size: int) -> OpenedCuda:
        """Maps the arena behind an IPC handle until its last view is gone. Raises DeviceFault.

        Another process must have made the handle: CUDA does not open its own.
        """
        if len(handle) != HANDLE_BYTES:
            raise DeviceFault(f"handle: {len(handle)} bytes; must be {HANDLE_BYTES}")
        with self.current():
            pointer = int(self.runtime.ipcOpenMemHandle(bytes(handle)))
        return OpenedCuda(_Mapping(self, pointer, size, self.runtime.ipcCloseMemHandle))


class _Mapping:
    """Memory at an address of the device, freed with the last reference to it."""

    def __init__(self, device: CudaDevice, pointer: int, size: int, give_back: Callable[[int], object]) -> None:
        self.device = device
        self.pointer = pointer
        self.size = size
        self.in_flight: list[_Transfer] = []
        """Copies that may still move bytes. The finalizer holds them until cudaFree, which waits for all copies."""
        weakref.finalize(self, _give_back, device, pointer, give_back, self.in_flight)


def _give_back(device: CudaDevice, pointer: int, give_back: Callable[[int], object], kept: list[_Transfer]) -> None:
    with suppress(DeviceFault), device.current():  # a device that is lost has given all back already
        give_back(pointer)
    kept.clear()


class OpenedCuda:
    """An arena mapped into this process. Its views are cupy arrays, which refer to the mapping and so keep it."""

    def __init__(self, mapping: _Mapping) -> None:
        self.size = mapping.size
        self._mapping: _Mapping | None = mapping

    def _mapped(self) -> _Mapping:
        if self._mapping is None:
            raise DeviceFault("the arena is closed")
        return self._mapping

    def view(self, offset: int, length: int) -> Any:
        """Views a range as a cupy array of uint8. Raises ValueError outside the arena, DeviceFault once closed."""
        check_range(self.size, offset, length)
        mapping = self._mapped()
        cupy = mapping.device.cupy
        memory = cupy.cuda.UnownedMemory(mapping.pointer, mapping.size, mapping, mapping.device.index)
        return cupy.ndarray((length,), "uint8", memptr=cupy.cuda.MemoryPointer(memory, offset))

    def close(self) -> None:
        """Drops the arena's own reference to the mapping, which ends with the last view of it."""
        self._mapping = None


class _Transfer:
    """An event behind the copies. It and its arena keep the host memory alive until that has happened."""

    def __init__(self, device: CudaDevice, event: Any, copies: Sequence[Copy]) -> None:
        self._device = device
        self._event = event
        self._copies: Sequence[Copy] = copies

    def done(self) -> bool:
        """Queries the event without blocking, and drops the host memory once it has happened. Raises DeviceFault."""
        with self._device.current():
            status = int(self._device.runtime.eventQuery(self._event.ptr))
            if status == _NOT_READY:
                return False
            if status != 0:
                raise self._device.runtime.CUDARuntimeError(status)
        self._copies = ()
        return True

    def settled(self) -> bool:
        """Whether it is known that no byte moves any more."""
        return not self._copies or int(self._device.runtime.eventQuery(self._event.ptr)) == 0

    def wait(self) -> None:
        """Sleeps until the event has happened, then drops the host memory. Raises DeviceFault."""
        with self._device.current():
            self._event.synchronize()
        self.done()


class CudaArena(OpenedCuda):
    """The memory that this process owns on a CUDA device, with one stream for each direction of copies.

    Close it after the clients have closed what they opened: CUDA leaves the other order undefined.
    """

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._device = device
        runtime, cupy = device.runtime, device.cupy
        try:
            with device.current():
                pointer = int(runtime.malloc(size))
        except DeviceFault as fault:
            raise DeviceFault(f"{size} bytes asked for, {device.free_bytes()} are free: {fault}") from fault
        super().__init__(_Mapping(device, pointer, size, runtime.free))
        self._registered: list[int] = []
        self._lock = threading.Lock()
        with device.current():
            self.handle = bytes(runtime.ipcGetMemHandle(pointer))
            self._up = cupy.cuda.Stream(non_blocking=True)
            self._down = cupy.cuda.Stream(non_blocking=True)

    def upload(self, copies: Sequence[Copy]) -> _Transfer:
        """Queues copies to the device on the upload stream. Raises DeviceFault, and ValueError outside the arena."""
        moves = list(self._addresses(copies))
        return self._submit(self._up, self._device.runtime.memcpyHostToDevice, moves, copies)

    def download(self, copies: Sequence[Copy]) -> _Transfer:
        """Queues copies to host memory on the download stream. Raises DeviceFault, and ValueError outside the arena."""
        moves = [(host, device, size) for device, host, size in self._addresses(copies)]
        return self._submit(self._down, self._device.runtime.memcpyDeviceToHost, moves, copies)

    def _addresses(self, copies: Sequence[Copy]) -> Iterator[tuple[int, int, int]]:
        pointer = self._mapped().pointer
        for offset, host in copies:
            check_copy(self.size, offset, host)
            yield pointer + offset, _address(host), host.nbytes

    def _submit(self, stream: Any, kind: int, moves: list[tuple[int, int, int]], copies: Sequence[Copy]) -> _Transfer:
        """`moves` are targets, sources and sizes."""
        runtime = self._device.runtime
        with self._device.current():
            event = self._device.cupy.cuda.Event(block=True, disable_timing=True)
            try:
                for target, source, size in moves:
                    runtime.memcpyAsync(target, source, size, kind, stream.ptr)
                event.record(stream)
            except runtime.CUDARuntimeError:
                with suppress(runtime.CUDARuntimeError):  # the caller may reuse its memory now
                    runtime.streamSynchronize(stream.ptr)
                raise
        transfer = _Transfer(self._device, event, copies)
        with self._lock:
            in_flight = self._mapped().in_flight
            in_flight[:] = [other for other in in_flight if not other.settled()] + [transfer]
        return transfer

    def register(self, memory: memoryview) -> bool:
        """Page-locks host memory until `close`. Blocks while its pages are faulted in; False: CUDA refused."""
        address = _address(memory)
        try:
            with self._device.current():
                self._device.runtime.hostRegister(address, memory.nbytes, _PORTABLE)
        except DeviceFault:
            return False
        self._registered.append(address)
        return True

    def pinned(self, size: int) -> memoryview:
        """Allocates page-locked host memory, or ordinary memory where CUDA refuses, for as long as a view lives."""
        try:
            with self._device.current():
                memory = memoryview(self._device.cupy.cuda.alloc_pinned_memory(size))
        except DeviceFault:
            memory = memoryview(bytearray(size))
        return memory.cast("B")[:size]

    def close(self) -> None:
        """Waits for the submitted copies, then frees the arena. Call it while registered memory is still mapped."""
        with suppress(DeviceFault), self._device.current():
            for stream in (self._up, self._down):
                self._device.runtime.streamSynchronize(stream.ptr)
        for address in self._registered:
            with suppress(DeviceFault), self._device.current():
                self._device.runtime.hostUnregister(address)
        self._registered.clear()
        super().close()


def _address(host: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(host))
