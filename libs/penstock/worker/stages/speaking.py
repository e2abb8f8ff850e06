"""`python -m penstock.worker.stages.speaking ADDRESS [MEMBER_TLS]`: speaks for a stage that is computed by the host at
ADDRESS, with a socket to the worker as its standard input, until one of them ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import grpc
import uvloop

from penstock.engine.ranks.followers import Launch, RankProcess
from penstock.engine.ranks.parent import with_parent
from penstock.engine.ranks.speaking import speak
from penstock.rpc.channels import open_channels
from penstock.rpc.checkup import own_version
from penstock.rpc.errors import from_rpc
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.tasks import first_of
from penstock.v1 import stage_pb2_grpc
from penstock.worker.stages.way import StageWay


def stages_away(hosts: Sequence[str], member_tls: Path | None) -> list[Launch]:
    """Start what speaks for the stages behind the first, which these hosts compute."""
    shown = () if member_tls is None else (str(member_tls),)
    return [partial(_start, (host, *shown)) for host in hosts]


def _start(arguments: tuple[str, ...], theirs: socket.socket) -> RankProcess:
    return RankProcess(theirs, __name__, *arguments)


async def _speak(address: str, member: MemberIdentity | None) -> str:
    """Why it has ended; empty: the worker has."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    with socket.socket(fileno=os.dup(0)) as lead:
        way = StageWay()

        def speaks() -> None:
            reason = ""
            try:
                speak(lead, way)
            except Exception as error:
                reason = str(error)
            loop.call_soon_threadsafe(ended.set_result, reason)

        async with open_channels(member) as channels:
            call = stage_pb2_grpc.StageStub(channels.to(address, "stage")).Compute(
                way.parts(own_version()), wait_for_ready=True
            )
            # A thread of its own, which nobody waits for: it may itself wait for the stage before.
            Thread(target=speaks, name="speaks", daemon=True).start()
            try:
                reason, _ = await first_of(_of(ended), way.read(call))
            except grpc.aio.AioRpcError as error:
                return from_rpc(error).message
    return "it has ended" if reason is None else reason


async def _of(ended: asyncio.Future[str]) -> str:
    return await ended


def main(address: str, member_tls: str = "") -> None:
    """Speaks for the stage at `address`; as a worker of a mesh with certificates, which are in `member_tls`."""
    with_parent()
    member = MemberIdentity.of(Path(member_tls), "worker") if member_tls else None
    if reason := uvloop.run(_speak(address, member)):
        print(f"the host of a stage at {address}: {reason}", file=sys.stderr, flush=True)
    os._exit(bool(reason))  # whatever threads wait for


if __name__ == "__main__":
    main(*sys.argv[1:])
