"""Benches of two checkouts that run at the same time, one of them at any moment.

A bench passes its turn before each of its samples, so that the same sample of both checkouts is taken within a moment,
in whatever state the machine is then. A checkout from before this file never passes: its turn ends with its run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_VARIABLE = "PENSTOCK_BENCH_TURNS"
"""The child's end of a socket: a byte from it passes the turn, a byte to it gives the turn back."""
_TURN = b"."


async def pass_turn() -> None:
    """Lets the other run go on until it passes its turn or ends; does nothing in a run without another."""
    named = os.environ.get(_VARIABLE)
    if named is None:
        return
    loop = asyncio.get_running_loop()
    with socket.fromfd(int(named), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.setblocking(False)
        await loop.sock_sendall(end, _TURN)
        if not await loop.sock_recv(end, 1):
            raise RuntimeError("whoever gives the turns has ended")


class TurnRun:
    """One run of a command that takes turns with another; `async with` ends what still runs."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command = command
        self._directory = directory
        self._end, self._its_end = socket.socketpair()
        self._end.setblocking(False)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __aexit__
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> TurnRun:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        for each in (self._end, self._its_end, self._said):
            each.close()

    async def turn(self) -> bool:
        """Lets the run go on, or begin; returns False when it has ended, True when it has passed its turn."""
        loop = asyncio.get_running_loop()
        if self._process is None:
            self._process = await self._start()
        else:
            with suppress(ConnectionError):  # it has ended while it waited
                await loop.sock_sendall(self._end, _TURN)
        if await loop.sock_recv(self._end, 1):
            return True
        await self._process.wait()
        return False

    def result(self) -> tuple[int, bytes]:
        """The exit status and the standard output of a run that has ended."""
        assert self._process is not None and self._process.returncode is not None
        self._said.seek(0)
        return self._process.returncode, self._said.read()

    async def _start(self) -> asyncio.subprocess.Process:
        own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        number = self._its_end.fileno()
        process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=self._directory,
            env=own | {_VARIABLE: str(number)},
            stdout=self._said,
            pass_fds=(number,),
        )
        self._its_end.close()  # only the child has it now: its end is the end of the stream
        return process


async def take_turns(runs: Iterable[TurnRun]) -> None:
    """Lets one run at a time go on, the first one first, until all have ended."""
    waiting = deque(runs)
    while waiting:
        run = waiting.popleft()
        if await run.turn():
            waiting.append(run)
