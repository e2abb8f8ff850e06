"""Brings weights to a device, from files through pinned memory, on several lanes at a time.

Each lane is a thread with a stream and two pinned buffers: while one buffer is copied to the device, the other is
filled from the file. Lanes start when the upload is opened and run ahead of the reader of the tensors by a bounded
number of bytes, so that weights arrive while kernels are compiled and tried.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint import EMBEDDING, Checkpoint, CheckpointError, TensorInfo
from penstock.engine.kernels.cuda.chunks import Chunk, deal, in_order
from penstock.engine.kernels.cuda.streams import new_stream, recorded
from penstock.engine.layers.stored import typed


class Upload:
    """The tensors of a checkpoint. Each can be taken once; an embedding that is also the head can be taken twice.

    It is a context manager: when the block is left, all lanes have ended.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        lanes: int = 4,
        chunk_bytes: int = 16 << 20,
        ahead_bytes: int = 2 << 30,
    ) -> None:
        self._device = device
        self._ahead = ahead_bytes
        tensors = in_order(checkpoint)
        self._number = {(info.file, info.name): at for at, info in enumerate(tensors)}
        self._sizes = [info.nbytes for info in tensors]
        self._begins = [0, *accumulate(self._sizes)]
        """Where each tensor begins when all are laid end to end."""
        self._arriving: dict[int, _Arriving] = {}
        self._again = {EMBEDDING} if checkpoint.config.tied else set()
        self._wanted = 0
        """Bytes up to the last tensor that was asked for; lanes go at most `ahead_bytes` beyond them."""
        self._news = threading.Condition()
        self._error: Exception | None = None
        self._closed = False
        work = deal(tensors, chunk_bytes, lanes)
        self._lanes = [threading.Thread(target=self._run, args=(own, chunk_bytes), name="upload") for own in work]

    def __enter__(self) -> Upload:
        for lane in self._lanes:
            lane.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        for lane in self._lanes:
            lane.join()

    def take(self, info: TensorInfo) -> Tensor:
        """The tensor on the device, in its stored type. What the current stream does from now on comes after the copies
        of its bytes. Raises CheckpointError."""
        number = self._number[info.file, info.name]
        size = self._sizes[number]
        with self._news:
            self._wanted = max(self._wanted, self._begins[number] + size)
            self._news.notify_all()
            self._news.wait_for(lambda: self._error is not None or self._complete(number))
            if self._error is not None:
                raise CheckpointError(info.file, str(self._error)) from self._error
            arriving = self._arriving.pop(number) if size else _Arriving(self._empty(0), None)
            if info.name in self._again:
                self._again.remove(info.name)
                self._arriving[number] = arriving
        for event in arriving.events:
            torch.cuda.current_stream(self._device).wait_event(event)
        return typed(info, arriving.content)

    def _complete(self, number: int) -> bool:
        arriving = self._arriving.get(number)
        size = self._sizes[number]
        return not size or (arriving is not None and arriving.submitted == size)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _run(self, work: Sequence[Chunk], chunk_bytes: int) -> None:
        try:
            lane = _Lane(self._device, chunk_bytes)
            try:
                for chunk in work:
                    arriving = self._begin(chunk)
                    if arriving is None:
                        return
                    event = lane.bring(chunk, arriving)
                    with self._news:
                        arriving.submitted += chunk.size
                        arriving.events += event
                        self._news.notify_all()
            finally:
                lane.close()
        except Exception as error:  # the next `take` raises it
            with self._news:
                self._error = error
                self._news.notify_all()

    def _begin(self, chunk: Chunk) -> _Arriving | None:
        """Waits until the chunk is near enough to what is wanted; None when the upload is over."""

        def near() -> bool:
            return self._closed or self._begins[chunk.tensor] <= self._wanted + self._ahead

        with self._news:
            self._news.wait_for(near)
            if self._closed:
                return None
            if chunk.tensor not in self._arriving:
                content = self._empty(self._sizes[chunk.tensor])
                self._arriving[chunk.tensor] = _Arriving(content, self._now())
            return self._arriving[chunk.tensor]

    def _now(self) -> Any:
        """An event to wait for before writing to memory that was just allocated: earlier work of the current stream may
        still use it, as the allocator orders use within one stream only."""
        if self._device.type != "cuda":
            return None
        return recorded(torch.cuda.current_stream(self._device))


class _Arriving:
    """A tensor on the device, and how much of it has been submitted for copying."""

    def __init__(self, content: Tensor, free: Any) -> None:
        """`free` is the event after which the memory may be written."""
        self.content = content
        self.free = free
        self.submitted = 0
        self.events: list[Any] = []


class _Lane:
    """A stream, two buffers and the open files of one thread."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._cuda = device.type == "cuda"
        self._stream: Any = new_stream(device) if self._cuda else None
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._busy: list[Any] = [None, None]
        self._next = 0
        self._files: dict[Path, int] = {}

    def bring(self, chunk: Chunk, arriving: _Arriving) -> list[Any]:
        """Reads the chunk and submits its copy; returns the events to wait for."""
        turn, self._next = self._next, 1 - self._next
        if self._busy[turn] is not None:
            self._busy[turn].synchronize()
        buffer = self._buffers[turn][: chunk.size]
        self._read(chunk, buffer.numpy().data)
        on: AbstractContextManager[Any] = torch.cuda.stream(self._stream) if self._cuda else nullcontext()
        if self._cuda:
            self._stream.wait_event(arriving.free)
        with on:
            arriving.content[chunk.at : chunk.at + chunk.size].copy_(buffer, non_blocking=True)
        if not self._cuda:
            return []
        event = recorded(self._stream)
        self._busy[turn] = event
        return [event]

    def _read(self, chunk: Chunk, into: memoryview) -> None:
        if chunk.file not in self._files:
            self._files[chunk.file] = os.open(chunk.file, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < chunk.size:
            count = os.preadv(self._files[chunk.file], [into[done:]], chunk.offset + done)
            if not count:
                raise OSError(f"{chunk.file} ends at {chunk.offset + done}")
            done += count

    def close(self) -> None:
        """Waits for the copies, because their buffers end with the lane, and closes the files."""
        if self._cuda:
            self._stream.synchronize()
        for file in self._files.values():
            os.close(file)
