"""A time that passes when nobody has anything to do, and processes that can be stopped and killed in it."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

_RUNNING_IN: ContextVar[PretendProcess] = ContextVar("process")
_MOST_CALLBACKS = 2_000_000
"""Of one world: more than a hundred times as many as most have."""

Result = TypeVar("Result")


class Endless(Exception):
    """A world in which nothing is left to happen although somebody waits, or too much happens."""


class PretendProcess:
    """What runs under one name from its start to its end. Stopped, it does nothing, and then all that it has missed;
    killed, it does nothing any more: no `finally` of it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.missed: deque[asyncio.Handle] | None = None
        """What has come for it while it is stopped or dead; None: it runs."""
        self.context = Context()
        self.context.run(_RUNNING_IN.set, self)

    @property
    def running(self) -> bool:
        """Neither stopped nor dead."""
        return self.missed is None

    def stop(self) -> None:
        """As SIGSTOP does."""
        if self.missed is None:
            self.missed = deque()

    def kill(self) -> None:
        """As SIGKILL does."""
        self.stop()
        self.dead = True

    def resume(self, loop: VirtualLoop) -> None:
        """As SIGCONT does; after a death, so that its tasks can be ended before the world does."""
        if self.missed is not None:
            missed, self.missed = self.missed, None
            loop.add_ready(missed)

    def run(self, job: Callable[..., Result], *args: Any) -> Result:
        """Calls `job` as a part of this process."""
        return self.context.copy().run(job, *args)


class _NamedTask(asyncio.Task[Any]):
    """A task that knows its process, and has the same place in every set in every run."""

    process: PretendProcess | None = None
    number = 0

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready in the order in which it became so, and then jumps to the next timer. No socket, no thread."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.current: PretendProcess | None = None
        """Whose callback runs."""
        self.callbacks = 0
        """That have run."""
        self._tasks = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """The time of the world."""
        return self.now

    def add_ready(self, handles: deque[asyncio.Handle]) -> None:
        """Runs these soon, in their order."""
        self._ready.extend(handles)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, /, context: Context | None = None
    ) -> asyncio.Task[Any]:
        context = copy_context() if context is None else context
        process = context.get(_RUNNING_IN, None) or self.current
        if process is not None and _RUNNING_IN not in context:  # a task that works for many requests
            context.run(_RUNNING_IN.set, process)
        self._tasks += 1
        task = _numbered(self._tasks, coro, loop=loop, context=context)
        task.process = process
        return task

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)
        if not ready:
            if not scheduled:
                raise Endless("everybody waits, and nothing is on its way")
            self.now = max(self.now, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self.now:
            ready.append(heapq.heappop(scheduled))
        self.callbacks += len(ready)
        if self.callbacks > _MOST_CALLBACKS:
            raise Endless(f"after {_MOST_CALLBACKS} callbacks somebody is still busy")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            process = self.current = handle._context.get(_RUNNING_IN)  # type: ignore[attr-defined]
            if process is not None and process.missed is not None:
                process.missed.append(handle)
            else:
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers go when they would be next."""

    def _write_to_self(self) -> None:
        """There is no other thread to be woken by."""

    def tasks_of(self, process: PretendProcess) -> list[asyncio.Task[Any]]:
        """Those that have not ended, the oldest first."""
        left = [task for task in asyncio.all_tasks(self) if isinstance(task, _NamedTask) and task.process is process]
        return sorted(left, key=hash)


def _numbered(number: int, *args: Any, **more: Any) -> _NamedTask:
    class_ = _NamedTask.__new__(_NamedTask)
    class_.number = number
    class_.__init__(*args, **more)  # type: ignore[misc]
    return class_
