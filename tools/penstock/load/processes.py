"""The processes of the client, and what they tell: sessions are shared out, and all begin at the same time."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from penstock.load.errors import LoadError
from penstock.load.records import LoadRecord
from penstock.load.worker import READY, LoadShare

_HEAD_START_S = 0.3
"""From when all are ready until the first session may begin."""
_LONGEST_LINE = 1 << 26
_DECODE = msgspec.json.Decoder(LoadRecord).decode


class ClientProcesses:
    """Plays rounds, each share of one in a process of its own."""

    def __init__(self) -> None:
        self._started: list[Process] = []
        self.stopped = False
        """Whether the run was ended early."""

    def stop(self) -> None:
        """From now on nothing is sent, and what is unanswered is told as cancelled."""
        self.stopped = True
        for process in self._started:
            assert process.stdin is not None
            process.stdin.close()

    async def play(self, shares: Sequence[LoadShare], told: Callable[[LoadRecord], None]) -> float:
        """Plays one round; `told` hears of every request when it is over. Returns the Unix time of the begin. Raises
        LoadError when a process fails."""
        try:
            for share in shares:
                self._started.append(await _started(share))
            for process in self._started:
                assert process.stdout is not None
                if await process.stdout.readline() != READY:
                    raise LoadError("a process of the client ended before it was ready")
            begin = time.monotonic() + _HEAD_START_S
            for process in self._started:
                assert process.stdin is not None
                if self.stopped:
                    process.stdin.close()
                else:
                    process.stdin.write(b"%r\n" % begin)
            await asyncio.gather(*(_heard(process, told) for process in self._started))
            return time.time() - (time.monotonic() - begin)
        finally:
            for process in self._started:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            self._started = []


async def _started(share: LoadShare) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.load.worker"),
        stdin=PIPE,
        stdout=PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl-C is for the one who tells the others
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(share) + b"\n")
    with suppress(ConnectionError):  # it has ended, which its output says
        await process.stdin.drain()
    return process


async def _heard(process: Process, told: Callable[[LoadRecord], None]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        try:
            told(_DECODE(line))
        except msgspec.DecodeError:  # the last one
            raise LoadError("a process of the client ended in the middle of what it said") from None
    if status := await process.wait():
        raise LoadError(f"a process of the client ended with {status}")
