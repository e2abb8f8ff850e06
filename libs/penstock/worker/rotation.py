"""A worker's place in the router's rotation: it joins, is taken out while it is stuck, and leaves."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from penstock.kv.spec import spec_to_message
from penstock.rpc.join import stay_joined
from penstock.rpc.server import RpcServer
from penstock.runtime.tasks import beside, first_of
from penstock.v1 import router_pb2
from penstock.worker.worker import Worker

_LOG = structlog.get_logger("penstock.worker")
_JOIN_PATIENCE_S = 5.0
"""Seconds that a worker waits for its router before it reports ready without it."""
_LOOK_S = 0.5
"""Seconds between two checks for a step that takes too long."""


@asynccontextmanager
async def in_rotation(
    worker: Worker, role: router_pb2.Role.ValueType, address: str, server: RpcServer
) -> AsyncIterator[None]:
    """Serves, and gets work from the router when one is configured, as long as the engine's steps end in time.

    When the block ends, the router is told to send nothing new; requests that run get `drain_s` seconds; then the
    worker leaves the router.
    """
    place = _Place(worker, hello(worker, role, address), server)
    async with beside(place.keep, name="join", on_failure="stop", failed=worker.metrics.task_failed):
        await place.taken()
        try:
            yield
        finally:
            await place.drain()


class _Place:
    """Joined while the engine works, not joined while it is stuck."""

    def __init__(self, worker: Worker, hello: router_pb2.Hello, server: RpcServer) -> None:
        self._worker = worker
        self._hello = hello
        self._server = server
        self._serving = asyncio.Event()
        self._joined = asyncio.Event()
        self._draining = asyncio.Event()

    async def keep(self) -> None:
        """Never returns; cancel it to leave the router."""
        while True:
            await self._serve()
            jobs = [self._until(stuck=True)]
            if self._worker.config.router:
                jobs.append(self._stay_joined())
            await first_of(*jobs)
            await self._server.set_serving(False)
            await self._server.set_live(False)
            _LOG.error("a step of the engine does not end: no work until it does", limit_s=self._limit_s)
            await self._until(stuck=False)
            await self._server.set_live(True)
            _LOG.warning("the engine works again")

    async def taken(self) -> None:
        """Returns when the worker serves and has joined its router, or when the router has not answered in time."""
        await self._serving.wait()
        if self._worker.config.router:
            with suppress(TimeoutError):  # the router may come later
                await asyncio.wait_for(self._joined.wait(), _JOIN_PATIENCE_S)

    async def drain(self) -> None:
        """Asks the router for no more work; returns when no request runs, after `drain_s` at the latest."""
        self._draining.set()
        await self._server.set_serving(False)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._worker.config.drain_s):
                await self._server.in_flight.idle()

    @property
    def _limit_s(self) -> float:
        return self._worker.config.step_limit_s

    async def _serve(self) -> None:
        if not self._draining.is_set():
            await self._server.set_serving(True)
        self._serving.set()

    async def _stay_joined(self) -> None:
        worker = self._worker
        await stay_joined(
            worker.channels.to(worker.config.router or ""),
            self._hello,
            lambda: load(worker),
            blocks=worker.resident.followed,
            changed=worker.changed,
            draining=self._draining,
            joined=self._joined,
        )

    async def _until(self, *, stuck: bool) -> None:
        """Polls until the engine is `stuck` or not; it polls because a thread that hangs cannot report."""
        pause = min(_LOOK_S, self._limit_s / 4)
        while True:
            overdue = self._worker.engine.stats().in_step_s > self._limit_s
            if overdue is stuck:
                return
            await asyncio.sleep(pause)


def hello(worker: Worker, role: router_pb2.Role.ValueType, address: str) -> router_pb2.Hello:
    """Introduces the worker, under an id of its own."""
    engine = worker.engine
    return router_pb2.Hello(
        member_id=uuid.uuid4().hex,
        role=role,
        address=address,
        host_id=worker.config.host,
        model_name=worker.config.served_name,
        spec=spec_to_message(engine.spec),
        max_model_len=engine.max_model_len,
        max_running=worker.config.engine.max_running,
        kv_capacity_tokens=engine.stats().total_pages * engine.spec.block_size,
    )


def load(worker: Worker) -> router_pb2.Load:
    """The present load."""
    stats = worker.engine.stats()
    return router_pb2.Load(
        running=stats.running,
        waiting=stats.waiting,
        queued_prefill_tokens=stats.queued_tokens,
        free_kv_tokens=stats.free_pages * worker.engine.spec.block_size,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        fetch_bytes_per_s=worker.rates.near.bytes_per_s,
        remote_bytes_per_s=worker.rates.far.bytes_per_s,
    )
