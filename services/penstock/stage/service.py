"""The Stage servicer: one worker at a time, and the thread that computes for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import msgspec
import structlog

from penstock.checkpoint import CheckpointError, inspect
from penstock.engine.ranks.hosting import host_stage
from penstock.errors import Refused
from penstock.rpc.checkup import own_version
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import serve
from penstock.runtime.config import ConfigError
from penstock.runtime.cores import parse_cores, stay_on
from penstock.runtime.tasks import alongside
from penstock.runtime.threads import started_threads, to_its_end
from penstock.stage.config import StageConfig
from penstock.stage.metrics import StageMetrics
from penstock.v1 import stage_pb2, stage_pb2_grpc
from penstock.worker.stages.way import StageWay

SERVICE = stage_pb2.DESCRIPTOR.services_by_name["Stage"].full_name
_LOG = structlog.get_logger("penstock.stage")
_MOST_CALLS = 16
_Context = grpc.aio.ServicerContext[stage_pb2.StagePart, stage_pb2.StagePart]


class StageService(stage_pb2_grpc.StageServicer):
    """Made by `open_stage`."""

    def __init__(self, config: StageConfig, thread: ThreadPoolExecutor, metrics: StageMetrics) -> None:
        """`thread` is one, and lives as long as the ranks that it starts."""
        self._config, self._thread, self._metrics = config, thread, metrics
        self._turn = asyncio.Lock()
        """Whoever has it is computed for."""

    async def Compute(
        self, request_iterator: AsyncIterator[stage_pb2.StagePart], context: _Context
    ) -> AsyncIterator[stage_pb2.StagePart]:
        """Computes for one worker, until it ends."""
        first = await anext(request_iterator, None)
        if first is None or first.version != own_version():
            found = first.version if first else ""
            raise Refused(f"version {found!r}: this host of a stage is {own_version()}; both sides have to be the same")
        with self._metrics.waiting.track_inprogress():
            await self._turn.acquire()
        try:
            self._metrics.workers.inc()
            _LOG.info("computes for a worker", worker=context.peer())
            way = StageWay()
            reading = way.read(self._counted(first, request_iterator))
            async with alongside(reading, self._compute(way), over=lambda _: way.close()):
                async for part in way.parts():
                    self._metrics.sent.inc(len(part.content))
                    yield part
            _LOG.info("the worker has ended")
        finally:
            self._turn.release()

    async def _counted(
        self, first: stage_pb2.StagePart, others: AsyncIterator[stage_pb2.StagePart]
    ) -> AsyncIterator[stage_pb2.StagePart]:
        self._metrics.received.inc(len(first.content))
        yield first
        async for part in others:
            self._metrics.received.inc(len(part.content))
            yield part

    async def _compute(self, way: StageWay) -> None:
        job = partial(host_stage, way, self._config.model, self._config.threads)
        try:
            await to_its_end(self._thread, job, stop=way.close)
        except (CheckpointError, msgspec.MsgspecError, OSError) as error:  # the worker has been told, or sent it
            _LOG.warning("the stage cannot be computed", reason=str(error))


@dataclass(frozen=True)
class OpenStage:
    """A host of a stage that serves."""

    address: str
    metrics: StageMetrics


@asynccontextmanager
async def open_stage(config: StageConfig) -> AsyncIterator[OpenStage]:
    """Serves until the block ends."""
    if config.cores:
        try:
            stay_on(parse_cores(config.cores))
        except OSError as error:
            raise ConfigError("cores", config.cores, f"{error.strerror}; use cores of this host") from error
    await asyncio.to_thread(inspect, config.model)  # what is wrong with it is said now
    metrics = StageMetrics()
    member = MemberIdentity.of(config.member_tls, "stage")
    thread = started_threads(1, "stage")
    try:
        register = partial(stage_pb2_grpc.add_StageServicer_to_server, StageService(config, thread, metrics))
        async with serve(
            config.address, register, [SERVICE], max_calls=_MOST_CALLS, grace=config.drain_s, member=member
        ) as server:
            await server.set_serving(True)
            yield OpenStage(config.address.at(server.port), metrics)
    finally:
        thread.shutdown()
