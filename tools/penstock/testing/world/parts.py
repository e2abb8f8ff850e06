"""The parts of a pretended mesh, each in a process that may end and begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from penstock.runtime.tasks import end, start
from penstock.testing.world.virtual import PretendProcess

Served = TypeVar("Served")
Opened = Callable[[], AbstractAsyncContextManager[Any]]


class PretendPart(Generic[Served]):
    """A service under one name: one process after another."""

    def __init__(self, name: str, opened: Callable[[], AbstractAsyncContextManager[Served]]) -> None:
        self.name = name
        self.process = PretendProcess(name)
        self.ready = asyncio.Event()
        """Set while it is served."""
        self.served: Served | None = None
        """What runs in the process; None while it starts or does not run."""
        self._opened = opened
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self._task is not None and not self.process.dead

    def launch(self) -> None:
        """Starts a process."""
        assert not self.up
        self.process = PretendProcess(self.name)
        self._task = self.process.run(self._start)

    def _start(self) -> asyncio.Task[None]:
        return start(self._run, name=self.name, on_failure="log", failed=lambda name: None)

    async def _run(self) -> None:
        try:
            async with self._opened() as self.served:
                self.ready.set()
                await asyncio.get_running_loop().create_future()
        finally:
            self._ended()

    def killed(self) -> None:
        """Its process is dead."""
        self.process.kill()
        self._task = None
        self._ended()

    def _ended(self) -> None:
        self.served = None
        self.ready.clear()

    async def close(self) -> None:
        """Ends the process in order."""
        task, self._task = self._task, None
        if task is not None:
            await end(task)

    def call(self, job: Callable[[], Awaitable[None]], name: str, failed: Callable[[str], None]) -> asyncio.Task[None]:
        """Runs something in the process."""

        async def run() -> None:
            await job()

        return self.process.run(lambda: start(run, name=name, on_failure="log", failed=failed))
