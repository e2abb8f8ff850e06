"""A process of the client that plays its share of the sessions: `python -m penstock.load.worker`.

It gets a share on its standard input and says that it is ready; then comes the time at which to begin. Each request is
a line on its standard output when it is over. When its input ends, it does: what is unanswered then is told as
cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
from contextlib import suppress

import msgspec
import uvloop

from penstock.load.planning import LoadSession
from penstock.load.playing import SessionsPlayer
from penstock.load.records import LoadRecord
from penstock.load.target import LoadTarget
from penstock.load.wording import Wording

READY = b"ready\n"
_OTHER_FILES = 64
"""Of those that a process may have open, are left for other things than requests."""


class LoadShare(msgspec.Struct, kw_only=True):
    """What one process does in one round."""

    target: LoadTarget
    wording: Wording
    sessions: tuple[LoadSession, ...]
    round: int
    process: int
    duration_s: float


def main() -> None:
    """The program."""
    share = msgspec.json.decode(sys.stdin.buffer.readline(), type=LoadShare)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    gc.freeze()  # what is there now stays: no collection has to look at it
    os.write(1, READY)
    start = sys.stdin.buffer.readline()
    if start:
        uvloop.run(_play(share, float(start), files - _OTHER_FILES))


class _Pipe(asyncio.BaseProtocol):
    """The way to whoever listens."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        """All that was said is written, or nobody listens any more."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is."""
        self.closed.set()


async def _play(share: LoadShare, start: float, at_once: int) -> None:
    loop = asyncio.get_running_loop()
    transport, pipe = await loop.connect_write_pipe(_Pipe, sys.stdout)

    def told(record: LoadRecord) -> None:
        transport.write(msgspec.json.encode(record) + b"\n")

    player = SessionsPlayer(
        share.target,
        share.wording,
        told,
        round=share.round,
        process=share.process,
        duration_s=share.duration_s,
        at_once=at_once,
    )
    task = asyncio.current_task()
    assert task is not None
    loop.add_reader(0, task.cancel)  # nothing else comes: its end alone
    with suppress(asyncio.CancelledError):
        await player.play(share.sessions, start)
    loop.remove_reader(0)
    transport.close()  # which writes what waits; a loop that ends would not
    await pipe.closed.wait()


if __name__ == "__main__":
    main()
