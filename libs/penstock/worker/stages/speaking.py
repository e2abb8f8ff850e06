"""`python -m penstock.worker.stages.speaking ADDRESS [MEMBER_TLS]`: speaks for a stage that is computed by the host at
ADDRESS, with a socket to the worker as its standard input, until one of them ends. When the host says that it will, it
writes to its standard output.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import structlog
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.checkpoint import Checkpoint
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.forward.model import Computes, load_model
from penstock.engine.ranks.followers import RankProcess
from penstock.engine.ranks.parent import with_parent
from penstock.engine.ranks.speaking import speak
from penstock.kv.spec import KvSpec
from penstock.rpc.channels import open_channels
from penstock.rpc.checkup import own_version
from penstock.rpc.errors import from_rpc
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import first_of
from penstock.runtime.telemetry import telemetry
from penstock.v1 import stage_pb2_grpc
from penstock.worker.stages.way import StageWay

_LOG = structlog.get_logger("penstock.worker")
_LOOK_S = 1.0
_CALL_S = 5.0
_AGAIN_S = 60.0
"""Seconds after which it says again that it waits."""
_LAST_WORDS_S = 2.0


class StagesAway:
    """The stages of a model that other hosts compute. Loads it; `give_up` may be called from another thread."""

    def __init__(self, hosts: Sequence[str], member_tls: Path | None) -> None:
        """Those of the stages but the first, in order; none: all are here. `member_tls` are a worker's."""
        self._hosts = hosts
        self._shown = () if member_tls is None else (str(member_tls),)
        self._started: list[RankProcess] = []

    def load(self, config: EngineConfig, checkpoint: Checkpoint) -> tuple[Computes, KvSpec]:
        """As load_model. Raises ConfigError when a host can't compute its stage."""
        try:
            return load_model(config, checkpoint, away=[partial(self._start, host) for host in self._hosts])
        except RankLost as error:
            if not self._hosts:
                raise
            raise ConfigError("stage_hosts", ",".join(self._hosts), str(error)) from error

    def give_up(self) -> None:
        """Ends what speaks for the stages: loading need not be waited for."""
        for process in self._started:
            process.kill()

    def _start(self, host: str, theirs: socket.socket) -> RankProcess:
        self._started.append(RankProcess(theirs, __name__, host, *self._shown))
        return self._started[-1]


async def _speak(address: str, member: MemberIdentity | None) -> str:
    """Why it has ended; empty: the worker has."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    way = StageWay()

    def speaks() -> None:
        reason = ""
        try:
            with socket.socket(fileno=os.dup(0)) as lead:
                speak(lead, way, _leaves)
        except Exception as error:
            reason = str(error)
        loop.call_soon_threadsafe(ended.set_result, reason)

    # A thread of its own, which nobody waits for: it may itself wait for the stage before.
    thread = Thread(target=speaks, name="speaks", daemon=True)
    async with open_channels(member) as channels:
        channel = channels.to(address, "stage")
        thread.start()
        reason = "it has ended"
        try:
            worker_has, _ = await first_of(_of(ended), _reached(channel, address, way))
            if worker_has is not None:
                return worker_has
        except grpc.aio.AioRpcError as error:
            reason = from_rpc(error).message
        with suppress(TimeoutError):  # what the host has said last may still be on its way to the worker
            async with asyncio.timeout(_LAST_WORDS_S):
                reason = await asyncio.shield(ended) or reason
    return reason


def _leaves() -> None:
    os.write(1, b".")


async def _of(ended: asyncio.Future[str]) -> str:
    return await asyncio.shield(ended)


async def _reached(channel: grpc.aio.Channel, address: str, way: StageWay) -> None:
    """Calls the host as soon as it answers, and takes what it says until it ends."""
    health: Any = health_pb2_grpc.HealthStub(channel)
    said, again = "", 0.0
    while True:
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_S)
            break
        except grpc.aio.AioRpcError as error:
            reason, now = from_rpc(error).message, asyncio.get_running_loop().time()
            if reason != said or now > again:
                _LOG.warning("waits for the host of a stage", host=address, reason=reason)
                said, again = reason, now + _AGAIN_S
        await asyncio.sleep(_LOOK_S)
    call = stage_pb2_grpc.StageStub(channel).Compute(way.parts(own_version()))
    await first_of(way.read(call), _patient(call, address))


async def _patient(call: Any, address: str) -> None:
    """Says that it waits when it has to wait long for its turn; never returns."""
    said = partial(_LOG.warning, "waits for the host of a stage, which computes for another worker", host=address)
    later = asyncio.get_running_loop().call_later(_CALL_S, said)
    try:
        await call.initial_metadata()
    finally:
        later.cancel()
    await asyncio.Event().wait()


def main(address: str, member_tls: str = "") -> None:
    """Speaks for the stage at `address`; as a worker of a mesh with certificates, which are in `member_tls`."""
    with_parent()
    with telemetry("worker"):
        member = MemberIdentity.of(Path(member_tls), "worker") if member_tls else None
        if reason := uvloop.run(_speak(address, member)):
            _LOG.error("the host of a stage is lost", host=address, reason=reason)
    os._exit(bool(reason))  # whatever threads wait for


if __name__ == "__main__":
    main(*sys.argv[1:])
