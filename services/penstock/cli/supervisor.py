"""Keeps a set of processes running: starts all at once, starts anew what dies, stops all in order.

Until all are ready for the first time, the end of one is the end of all (`ChildFailed`): a wrong setting should be
heard of, not retried. Afterwards a child that dies comes back after a growing pause, at the same address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from penstock.cli.child import Child, ChildSpec, Values, running


class State(Enum):
    """Of one child."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Change:
    """Something that an onlooker may want to show."""

    name: str
    state: State
    exit_code: int | None = None
    """When down."""
    tail: tuple[str, ...] = ()
    """When down: its last lines."""
    back_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits, in seconds."""

    stop_s: float = 8.0
    """For the end of one stage after SIGTERM; then SIGKILL."""
    first_backoff_s: float = 0.2
    last_backoff_s: float = 10.0
    sound_after_s: float = 30.0
    """A child that lived so long starts the backoff anew."""


class ChildFailed(Exception):
    """A child ended before all were ready."""

    def __init__(self, name: str, exit_code: int, tail: Sequence[str]) -> None:
        super().__init__(f"{name} ended with {describe_exit(exit_code)}")
        self.name = name
        self.exit_code = exit_code
        self.tail = list(tail)


class Supervisor:
    """Made by `supervised`."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        on_change: Callable[[Change], None],
        on_line: Callable[[str, str], None],
        patience: Patience,
    ) -> None:
        self._specs = specs
        self._on_change = on_change
        self._on_line = on_line
        self._patience = patience
        self._children: dict[str, Child] = {}
        self._values: dict[str, Values] = {}
        self._started = asyncio.Event()
        self._failure: ChildFailed | None = None
        self._stopping = asyncio.Event()

    async def ready(self) -> dict[str, Values]:
        """Returns when every child has been ready; what they said of themselves, by name. Raises ChildFailed."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure
        return dict(self._values)

    def pids(self) -> dict[str, int]:
        """Of the children that run, by name."""
        return {name: child.pid for name, child in self._children.items()}

    def kill(self) -> None:
        """Ends all children at once."""
        self._stopping.set()
        for child in list(self._children.values()):
            child.kill()

    async def keep(self, spec: ChildSpec) -> None:
        """Runs one child until the supervisor stops."""
        backoff = self._patience.first_backoff_s
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code, tail = await self._run_once(spec)
            if self._stopping.is_set():
                break
            if len(self._values) < len(self._specs):
                self._fail(ChildFailed(spec.name, code, tail))
                break
            if loop.time() - began > self._patience.sound_after_s:
                backoff = self._patience.first_backoff_s
            self._on_change(Change(spec.name, State.DOWN, code, tuple(tail), backoff))
            await self._stopping_within(backoff)
            backoff = min(2 * backoff, self._patience.last_backoff_s)
        self._on_change(Change(spec.name, State.STOPPED))

    async def stop(self) -> None:
        """Asks all to stop, stage by stage; who does not is killed."""
        self._stopping.set()
        for _, stage in groupby(sorted(self._specs, key=_stage), key=_stage):
            children = [child for spec in stage if (child := self._children.get(spec.name))]
            for child in children:
                child.ask_to_stop()
            await self._ended_or_killed(children)

    def _fail(self, failure: ChildFailed) -> None:
        if self._failure is None:
            self._failure = failure
            self._started.set()

    async def _run_once(self, spec: ChildSpec) -> tuple[int, list[str]]:
        def ready(values: Values) -> None:
            self._values[spec.name] = values
            self._on_change(Change(spec.name, State.READY))
            if len(self._values) == len(self._specs):
                self._started.set()

        self._on_change(Change(spec.name, State.STARTING))
        async with running(spec, ready, self._on_line) as child:
            self._children[spec.name] = child
            try:
                if self._stopping.is_set():
                    child.kill()
                code = await child.ended()
            finally:
                del self._children[spec.name]
        return code, child.tail

    async def _ended_or_killed(self, children: list[Child]) -> None:
        ends = [asyncio.ensure_future(child.ended()) for child in children]
        if ends:
            await asyncio.wait(ends, timeout=self._patience.stop_s)
        for child, end in zip(children, ends, strict=True):
            if not end.done():
                child.kill()
        await asyncio.gather(*ends)

    async def _stopping_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


@asynccontextmanager
async def supervised(
    specs: Sequence[ChildSpec],
    on_change: Callable[[Change], None],
    on_line: Callable[[str, str], None],
    patience: Patience | None = None,
) -> AsyncIterator[Supervisor]:
    """Runs `specs` for the length of the block; no process is left after it."""
    supervisor = Supervisor(specs, on_change, on_line, patience or Patience())
    keepers = [asyncio.create_task(supervisor.keep(spec)) for spec in specs]  # awaited below, whatever happens
    try:
        yield supervisor
    finally:
        await supervisor.stop()
        await asyncio.gather(*keepers)


def describe_exit(code: int) -> str:
    """`exit code 3`, or `signal 9`."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _stage(spec: ChildSpec) -> int:
    return spec.stop_stage
