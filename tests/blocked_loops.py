"""A debug mode of the suite: `pytest --blocked-loop 20` fails each test in which a task held the event loop for longer
than 20 ms. While a task holds the loop nobody else on it is served.

What counts is the time that one step of one task takes, less the time in which the kernel gave the processor to
somebody else, and less what the host of a virtual machine took from it: so a busy machine doesn't fail tests, while
computing, waiting for the interpreter lock that a thread holds, and calls that block do. Steps of the tests' own tasks
don't count: they are clients, and they open services. Nor does the garbage collector, which has the heaps of the whole
mesh and of pytest to look through here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_TESTS = str(Path(__file__).parent)
CLIENTS = (_TESTS, "pytest_asyncio", "_pytest")
"""Code of these places runs in clients' tasks."""
_DEEPEST = 12


@dataclass(frozen=True)
class Blocked:
    """One step that was too long."""

    task: str
    seconds: float
    stack: str
    """Where the step was when the limit had passed; empty when it ended at that moment."""

    def __str__(self) -> str:
        return f"{self.task} held the event loop for {self.seconds * 1e3:.0f} ms\n{self.stack}"


class LoopWatch:
    """Measures every step of every event loop of asyncio while `watching`."""

    def __init__(self, limit_s: float, clients: Sequence[str] = CLIENTS) -> None:
        self._limit_s = limit_s
        self._clients = clients
        self._found: list[Blocked] = []
        self._running: tuple[int, float] | None = None
        """The thread that runs a step, and since when."""
        self._seen: tuple[float, str] = (0.0, "")
        """When the step began whose stack this is."""
        self._stolen = _Stolen()
        self._over = threading.Event()

    def take(self) -> list[Blocked]:
        """The steps found since the last call."""
        found, self._found = self._found, []
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches for the length of the block."""
        run = asyncio.Handle._run
        waited, collecting = _Waited(), _Collecting()
        stolen = self._stolen = _Stolen()
        thread = threading.Thread(target=self._look, daemon=True)

        def measured(handle: asyncio.Handle) -> None:
            before, began = waited.seconds() + collecting.seconds, time.perf_counter()
            self._running = threading.get_ident(), began
            try:
                run(handle)
            finally:
                self._running = None
                took = time.perf_counter() - began
                if took > self._limit_s:
                    took -= waited.seconds() + collecting.seconds - before
                if took > self._limit_s and (took := took - stolen.since(began)) > self._limit_s:
                    self._add(handle, began, took)

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        gc.callbacks.append(collecting)
        thread.start()
        try:
            yield
        finally:
            gc.callbacks.remove(collecting)
            asyncio.Handle._run = run  # type: ignore[method-assign]
            self._over.set()
            thread.join()

    def _add(self, handle: asyncio.Handle, began: float, took: float) -> None:
        name, place = _who(handle)
        if not any(part in place for part in self._clients):
            self._found.append(Blocked(name, took, self._seen[1] if self._seen[0] == began else ""))

    def _look(self) -> None:
        """Notes once per step where it is when its time is over."""
        while not self._over.wait(self._limit_s / 8):
            self._stolen.sample()
            running = self._running
            if running is None or running[1] == self._seen[0] or time.perf_counter() - running[1] < self._limit_s:
                continue
            frame = sys._current_frames().get(running[0])
            if frame is not None and self._running == running:
                self._seen = running[1], _stack(frame)


class _Waited:
    """How long the calling thread was ready to run and did not get a processor; 0 where the kernel doesn't tell."""

    def __init__(self) -> None:
        self._files = threading.local()

    def seconds(self) -> float:
        """Since the thread began."""
        file = getattr(self._files, "schedstat", None)
        try:
            if file is None:
                path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
                file = self._files.schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0


class _Stolen:
    """How long the host ran others where this virtual machine's processors wanted to run; 0 where nobody tells. The
    kernel books it at its ticks, some milliseconds apart."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque([(0.0, _stolen())], maxlen=4096)
        """When, and seconds since the machine's start."""

    def sample(self) -> None:
        self._samples.append((time.perf_counter(), _stolen()))

    def since(self, began: float) -> float:
        """Seconds of all processors, as the thread that holds the interpreter lock may have been on another one."""
        before = next((stolen for when, stolen in reversed(self._samples.copy()) if when <= began), self._samples[0][1])
        return _stolen() - before


def _stolen() -> float:
    try:
        with open("/proc/stat", "rb", buffering=0) as file:
            return int(file.read(200).split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


class _Collecting:
    """Seconds that the garbage collector took, in whatever thread: it keeps the interpreter lock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


def _who(handle: asyncio.Handle) -> tuple[str, str]:
    """The name of what a handle runs, and the file of its code; empty when it is not Python's."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(callback), _file(getattr(callback, "__code__", None))
    coroutine = task.get_coro()
    name = f"task {task.get_name()} ({getattr(coroutine, '__qualname__', coroutine)})"
    return name, _file(getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None))


def _file(code: object) -> str:
    return code.co_filename if isinstance(code, CodeType) else ""


def _stack(frame: FrameType) -> str:
    """The deepest frames of the step, without those of the loop that runs it."""
    frames = traceback.extract_stack(frame)
    loop = max((at for at, one in enumerate(frames) if one.filename == __file__), default=-1)
    return "".join(traceback.format_list(frames[loop + 2 :][-_DEEPEST:]))
