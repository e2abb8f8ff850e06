"""Keeps a set of processes running: starts all at once, restarts those that die or hang, stops all in order.

Until all are ready for the first time, the end of one is the end of all (`ChildFailed`): a wrong setting should be
reported, not retried. Afterwards a child that dies comes back at the same address: at once the first time, then after a
growing pause. One that no longer answers gRPC's health check, or answers for too long that it is stuck, is killed and
comes back likewise. Those that import torch are forked from a process that has done so already (`zygote.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any

from penstock.cli.child import Child, ChildSpec, Values, running
from penstock.cli.forking import Zygote, prepared
from penstock.cli.liveness import silence, stuck
from penstock.runtime.tasks import beside, first_of

_AWHILE_S = 1.0
"""Seconds after which it is said who has not stopped yet."""


class ChildState(Enum):
    """State of one child process."""

    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"
    """It does not answer and is being killed."""
    STUCK = "stuck"
    """It has said for too long that it is stuck and is being killed."""
    DOWN = "down"
    STOPPING = "stopping"
    """It was asked to stop a while ago and still runs."""
    UNSTOPPED = "unstopped"
    """It has not stopped in time and is being killed."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ChildChange:
    """A change of a child's state, with what an onlooker may want to show."""

    name: str
    state: ChildState
    exit_code: int | None = None
    """When down."""
    tail: tuple[str, ...] = ()
    """When down: its last lines."""
    back_in_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the supervisor waits, in seconds."""

    stop_s: float = 10.0
    """After SIGTERM, until one stage has ended; then SIGKILL."""
    first_backoff_s: float = 0.2
    """Before the second restart of a child that keeps dying; the first one is at once."""
    last_backoff_s: float = 10.0
    sound_after_s: float = 30.0
    """A child that has run this long before it dies is restarted at once again."""
    hung_s: float = 0.0
    """A child that has been ready and answers no health check for this long is killed; 0: never."""
    stuck_s: float = 0.0
    """A child that has been ready and says for this long that it is not live is killed; 0: never."""


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
        on_change: Callable[[ChildChange], None],
        on_line: Callable[[str, str], None],
        patience: Patience,
        *,
        zygote: Zygote,
    ) -> None:
        self._specs = specs
        self._zygote = zygote
        self._on_change = on_change
        self._on_line = on_line
        self._patience = patience
        self._children: dict[str, Child] = {}
        self._values: dict[str, Values] = {}
        self._started = asyncio.Event()
        self._failure: ChildFailed | None = None
        self._stopping = asyncio.Event()

    async def ready(self) -> dict[str, Values]:
        """Returns when every child has been ready; their messages about themselves, by name. Raises ChildFailed."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure
        return dict(self._values)

    def pids(self) -> dict[str, int]:
        """Process ids of the running children, by name."""
        return {name: child.pid for name, child in self._children.items()}

    def kill(self) -> None:
        """Ends all children at once."""
        self._stopping.set()
        for child in list(self._children.values()):
            child.kill()

    async def keep(self, spec: ChildSpec) -> None:
        """Runs one child until the supervisor stops."""
        backoff = 0.0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            try:
                code, tail = await self._run_once(spec)
            except OSError as error:  # the system has no process for it now: the others go on
                if len(self._values) < len(self._specs):
                    raise
                code, tail = os.EX_OSERR, [f"could not be started: {error}"]
            if self._stopping.is_set():
                break
            if len(self._values) < len(self._specs):
                self._fail(ChildFailed(spec.name, code, tail))
                break
            if loop.time() - began > self._patience.sound_after_s:
                backoff = 0.0
            self._on_change(ChildChange(spec.name, ChildState.DOWN, code, tuple(tail), backoff))
            await self._stopping_within(backoff)
            backoff = min(max(self._patience.first_backoff_s, 2 * backoff), self._patience.last_backoff_s)
        self._on_change(ChildChange(spec.name, ChildState.STOPPED))

    async def stop(self) -> None:
        """Asks all to stop, stage by stage; a child that does not is killed."""
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
        told: asyncio.Future[Values] = asyncio.get_running_loop().create_future()

        def ready(values: Values) -> None:
            told.set_result(values)
            self._values[spec.name] = values
            self._on_change(ChildChange(spec.name, ChildState.READY))
            if len(self._values) == len(self._specs):
                self._started.set()

        self._on_change(ChildChange(spec.name, ChildState.STARTING))
        async with running(spec, ready, self._on_line, self._zygote) as child:
            self._children[spec.name] = child
            try:
                if self._stopping.is_set():
                    child.kill()
                watch = partial(self._kill_when_useless, child, told)
                async with beside(watch, name=f"liveness of {spec.name}", on_failure="restart", failed=_not_counted):
                    code = await child.ended()
            finally:
                del self._children[spec.name]
        return code, child.tail

    async def _kill_when_useless(self, child: Child, told: asyncio.Future[Values]) -> None:
        """Kills a child that was ready once and is hung or stuck now; one that loads its model is not ready yet."""
        values = await asyncio.shield(told)
        address = values.get("grpc_address") or values.get("address")
        if not isinstance(address, str) or values.get("tls"):
            return  # the health check speaks no TLS
        watches = ((silence, self._patience.hung_s, ChildState.HUNG), (stuck, self._patience.stuck_s, ChildState.STUCK))
        jobs = [_then(watch(address, bound_s), state) for watch, bound_s, state in watches if bound_s]
        if not jobs:
            return
        found = next(state for state in await first_of(*jobs) if state is not None)
        if not self._stopping.is_set():
            self._on_change(ChildChange(child.spec.name, found))
            child.kill()

    async def _ended_or_killed(self, children: list[Child]) -> None:
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(child.ended()) for child in children]
            found = list(zip(children, ends, strict=True))
            awhile = min(_AWHILE_S, self._patience.stop_s)
            for state, seconds in (
                (ChildState.STOPPING, awhile),
                (ChildState.UNSTOPPED, self._patience.stop_s - awhile),
            ):
                if ends:
                    await asyncio.wait(ends, timeout=seconds)
                for child, end in found:
                    if not end.done():
                        self._on_change(ChildChange(child.spec.name, state))
            for child, end in found:
                if not end.done():
                    child.kill()

    async def _stopping_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


@asynccontextmanager
async def supervised(
    specs: Sequence[ChildSpec],
    on_change: Callable[[ChildChange], None],
    on_line: Callable[[str, str], None],
    patience: Patience | None = None,
) -> AsyncIterator[Supervisor]:
    """Runs `specs` for the length of the block; no process is left after it."""
    async with AsyncExitStack() as stack:
        zygote = await stack.enter_async_context(prepared(*_imports(specs)))
        supervisor = Supervisor(specs, on_change, on_line, patience or Patience(), zygote=zygote)
        keepers = [
            await stack.enter_async_context(
                beside(partial(supervisor.keep, spec), name=f"keep {spec.name}", on_failure="stop", failed=_not_counted)
            )
            for spec in specs
        ]
        try:
            yield supervisor
        finally:
            await supervisor.stop()
            for keeper in keepers:
                await keeper.ended()


def _imports(specs: Sequence[ChildSpec]) -> tuple[list[str], Mapping[str, str]]:
    """What a zygote imports for those that are forked, and what of their environment it has to have then."""
    forked = [spec for spec in specs if spec.imports]
    common = frozenset.intersection(*(frozenset(spec.environment.items()) for spec in forked)) if forked else ()
    return sorted({spec.imports for spec in forked}), dict(common)


def _not_counted(_task: str) -> None:
    """The command line has no metrics; a failure is in its log."""


async def _then(watch: Coroutine[Any, Any, None], state: ChildState) -> ChildState:
    await watch
    return state


def describe_exit(code: int) -> str:
    """`exit code 3`, or `signal 9`."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _stage(spec: ChildSpec) -> int:
    return spec.stop_stage
