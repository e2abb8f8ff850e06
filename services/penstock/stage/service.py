"""The Stage servicer: one worker at a time, and the thread that computes for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from penstock.checkpoint import inspect, remembered_fingerprint
from penstock.engine.ranks.distance import ENCODER, Leaving
from penstock.engine.ranks.hosting import host_stage
from penstock.errors import Refused
from penstock.rpc.checkup import own_version
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.server import serve
from penstock.runtime.cores import keep_to
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

    def __init__(
        self, config: StageConfig, fingerprint: str, thread: ThreadPoolExecutor, metrics: StageMetrics
    ) -> None:
        """`fingerprint` is the model's; `thread` is one, and lives as long as the ranks that it starts."""
        self._config, self._fingerprint = config, fingerprint
        self._thread, self._metrics = thread, metrics
        self._turn = asyncio.Lock()
        """Whoever has it is computed for."""
        self._way: StageWay | None = None
        """To that worker."""

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
            await context.send_initial_metadata(())  # so that the worker knows
            self._metrics.workers.inc()
            _LOG.info("computes for a worker", worker=context.peer())
            way = self._way = StageWay()
            reading = way.read(self._counted(first, request_iterator))
            async with alongside(reading, self._compute(way), over=lambda _: way.close()):
                async for part in way.parts():
                    self._metrics.sent.inc(len(part.content))
                    yield part
            _LOG.info("computes for this worker no more", worker=context.peer())
        finally:
            self._way = None
            self._turn.release()

    def leave(self) -> None:
        """Has the worker want nothing new: this host will end."""
        if self._way is not None:
            self._way.put(ENCODER.encode(Leaving()))

    async def _counted(
        self, first: stage_pb2.StagePart, others: AsyncIterator[stage_pb2.StagePart]
    ) -> AsyncIterator[stage_pb2.StagePart]:
        self._metrics.received.inc(len(first.content))
        yield first
        async for part in others:
            self._metrics.received.inc(len(part.content))
            yield part

    async def _compute(self, way: StageWay) -> None:
        job = partial(host_stage, way, self._config.model, self._fingerprint, self._config.threads)
        await to_its_end(self._thread, job, stop=way.close)


@dataclass(frozen=True)
class OpenStage:
    """A host of a stage that serves."""

    address: str
    metrics: StageMetrics


@asynccontextmanager
async def open_stage(config: StageConfig) -> AsyncIterator[OpenStage]:
    """Serves until the block ends."""
    keep_to(config.cores)
    fingerprint = await asyncio.to_thread(lambda: remembered_fingerprint(inspect(config.model)))
    metrics = StageMetrics()
    member = MemberIdentity.of(config.member_tls, "stage")
    thread = started_threads(1, "stage")
    service = StageService(config, fingerprint, thread, metrics)
    try:
        register = partial(stage_pb2_grpc.add_StageServicer_to_server, service)
        async with serve(
            config.address, register, [SERVICE], max_calls=_MOST_CALLS, grace=config.drain_s, member=member
        ) as server:
            await server.set_serving(True)
            try:
                yield OpenStage(config.address.at(server.port), metrics)
            finally:
                service.leave()
    finally:
        thread.shutdown()
