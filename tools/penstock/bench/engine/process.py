"""An engine in a process of its own that answers JSON lines: ours, or a peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

_LONGEST_ANSWER = 1 << 20
_FAREWELL_S = 10.0


class Failed(Exception):
    """An engine cannot be measured, or not any further; the message says why."""


class Talk:
    """Questions to a running process, one after the other. Made by `started`."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    async def ask(self, do: str, limit_s: float, **values: object) -> Any:
        """The answer. Raises Failed: the engine says no, takes longer than `limit_s`, or is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        try:
            async with asyncio.timeout(limit_s):
                self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Failed(f"{do} took more than {limit_s:.0f} s") from None
        except OSError as error:
            raise Failed(f"ended in {do}: {error}; {self._last_words()}") from None
        if not line:
            raise Failed(f"ended in {do}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"{do}: {answer['error']}")
        return answer["ok"]

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][-400:] if lines else "it said nothing"


@asynccontextmanager
async def started(
    command: Sequence[str | Path], directory: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Talk]:
    """A process for the length of the block, with exactly this `environment`. Raises Failed."""
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=directory,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_LONGEST_ANSWER,
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"{command[0]} can't be started: {error.strerror}") from None
        try:
            yield Talk(process, log)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes its input, which should end it; kills it and its children when it does not end in time."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
