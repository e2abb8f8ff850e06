"""A worker's place in the rotation of every router: it joins, is taken out while it is stuck, and leaves."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import structlog

from penstock.engine.stats import EngineStats
from penstock.kv.spec import spec_to_message
from penstock.rpc.checkup import WIRE, own_version
from penstock.rpc.join import stay_joined
from penstock.rpc.server import RpcServer
from penstock.rpc.wish import WorkerWish
from penstock.runtime.tasks import beside, first_of
from penstock.v1 import router_pb2
from penstock.worker.adapting import adapted, adapters_of
from penstock.worker.progress import limit_s, overdue
from penstock.worker.rates import TransferCost
from penstock.worker.worker import Worker

_LOG = structlog.get_logger("penstock.worker")
_JOIN_PATIENCE_S = 5.0
"""Seconds that a worker waits for its router before it reports ready without it."""
_LOOK_S = 0.25
"""Seconds between two looks at the engine, by who cannot wait for it: a thread that hangs reports nothing."""
_NO_OVERHEAD_S = 1e-9
"""0 says that it is not known."""
_SOURCES = tuple(field.name for field in router_pb2.PromptSources.DESCRIPTOR.fields)
ROLES = (router_pb2.ROLE_PREFILL, router_pb2.ROLE_DECODE, router_pb2.ROLE_BOTH)
"""That a worker may have."""


@asynccontextmanager
async def in_rotation(
    worker: Worker, role: router_pb2.Role.ValueType, address: str, server: RpcServer
) -> AsyncIterator[asyncio.Event]:
    """Serves, and gets work from the router when one is configured, as long as the engine's steps end in time.

    A router may tell the worker to take another role, or nothing new: then what runs goes on, and all routers hear of
    it. The event is set when one has told it to end, and nothing runs any more. When the block ends, the routers are
    told to send nothing new; requests that run get `drain_s` seconds; then the worker leaves the routers.
    """
    place = _Place(worker, hello(worker, role, address), server)
    async with beside(place.keep, name="join", on_failure="stop", failed=worker.metrics.task_failed):
        await place.taken()
        try:
            yield place.done
        finally:
            await place.drain()


class _Place:
    """Joined while the worker lives; it reports whether its engine gets on, and takes no work while it does not."""

    def __init__(self, worker: Worker, hello: router_pb2.Hello, server: RpcServer) -> None:
        self._worker = worker
        self._hello = hello
        self._server = server
        self._serving = asyncio.Event()
        self._joined = [asyncio.Event() for _ in worker.config.router]
        """For each router, set while it has this worker."""
        self._wish = WorkerWish(hello.role)
        self._leaving = self._late = False
        self.done = asyncio.Event()
        """Set when the worker was told to end and has nothing to do any more."""

    async def keep(self) -> None:
        """Never returns; cancel it to leave the router."""
        await self._serve()
        self._serving.set()
        jobs = [self._watch_steps(), self._follow_commands(), self._end_when_told(), self._end_when_lost()]
        if self._worker.config.router:
            jobs.append(self._stay_joined())
        await first_of(*jobs)

    async def taken(self) -> None:
        """Returns when the worker serves and has joined its routers, or when one of them has not answered in time."""
        await self._serving.wait()
        with suppress(TimeoutError):  # it may come later
            async with asyncio.timeout(_JOIN_PATIENCE_S):
                for joined in self._joined:
                    await joined.wait()

    async def drain(self) -> None:
        """Asks the routers for no more work; returns when no request runs, after `drain_s` at the latest."""
        self._leaving = True
        self._wish.drain()
        await self._serve()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._worker.config.drain_s):
                await self._server.in_flight.idle()

    def obey(self, command: router_pb2.MemberCommand) -> None:
        """Does what a router says; what makes no sense here is logged."""
        match command.WhichOneof("kind"):
            case "role" if command.role in ROLES:
                self._wish.take(command.role)
            case "drain" if command.drain or not self._leaving:
                self._wish.drain(command.drain, ends=command.exit)
            case kind:
                _LOG.warning("a command that this worker does not follow", command=kind, leaving=self._leaving)

    def evict(self, order: router_pb2.EvictOrder) -> router_pb2.Evicted:
        """Drops the blocks of a tenant from the worker's pages; those that sequences hold go when they are released."""
        roots = frozenset(order.roots) | self._worker.adapted_roots.of(order.namespace)
        blocks, in_use = self._worker.engine.pool.drop(roots)
        _LOG.info("blocks of a tenant are dropped", blocks=blocks, in_use=in_use)
        size = self._worker.engine.spec.block_bytes
        dropped = router_pb2.EvictedBlocks(blocks=blocks, bytes=blocks * size, in_use=in_use)
        return router_pb2.Evicted(number=order.number, tiers=[dropped])

    async def _follow_commands(self) -> NoReturn:
        """Says of the worker's health and in the log what a command has changed. Who only computes prompts lends no
        pages: decode asks for all of them at once."""
        known = self._wish.now
        while True:
            known = await self._wish.other_than(known)
            _LOG.info("wanted work", role=_name(known.role), draining=known.draining, ends=known.ends)
            self._worker.publisher.lends = known.role != router_pb2.ROLE_PREFILL
            await self._serve()

    async def _end_when_told(self) -> NoReturn:
        """Sets `done` when nothing runs any more, unless new work is wanted before."""
        while True:
            wanted = self._wish.now
            if wanted.ends:
                await first_of(self._server.in_flight.idle(), self._wish.other_than(wanted))
                if self._wish.now.ends and not self._server.in_flight.count:
                    self.done.set()
            if wanted == self._wish.now:
                await self._wish.other_than(wanted)

    async def _end_when_lost(self) -> NoReturn:
        """Wants no more work and ends as soon as another process that computes a part of the model has ended, or says
        that it will."""
        engine = self._worker.engine
        await first_of(engine.lost.wait(), engine.leaving.wait())
        self._leaving = True
        self._wish.drain(ends=True)
        while True:
            await asyncio.Event().wait()

    async def _serve(self) -> None:
        """Says whether the worker takes new work."""
        await self._server.set_serving(not (self._late or self._wish.now.draining))

    async def _stay_joined(self) -> None:
        worker = self._worker
        changed = [asyncio.Event() for _ in worker.config.router]
        joins = [
            stay_joined(
                worker.channels.to(router, "router"),
                self._hello,
                lambda: load(worker),
                blocks=worker.resident.followed,
                changed=changed[number],
                wish=self._wish,
                joined=self._joined[number],
                obey=self.obey,
                evict=self.evict,
                plan_keys=worker.plan_keys,
                adapters=lambda: adapters_of(worker.engine),
                adapt=lambda order: adapted(worker, order),
            )
            for number, router in enumerate(worker.config.router)
        ]
        await first_of(_pass_on(worker.changed, changed), *joins)

    async def _watch_steps(self) -> None:
        """Tells the router at once when a step is overdue and when it has ended, and the supervisor when it takes so
        long that only another process helps."""
        stuck = False
        most_s = self._worker.config.step_limit_s
        while True:
            await asyncio.sleep(_LOOK_S)
            stats = self._worker.stats()
            if overdue(stats, most_s) is not self._late:
                self._late = not self._late
                self._worker.changed.set()
                await self._serve()
                if self._late:
                    _LOG.error(
                        "a step of the engine does not end, or none begins: no work until it does",
                        expected_s=round(stats.expected_s, 4),
                        limit_s=round(limit_s(stats, most_s), 3),
                    )
                else:
                    _LOG.warning("the engine works again")
            if (self._late and stats.in_step_s > most_s) is not stuck:
                stuck = not stuck
                await self._server.set_live(not stuck)


async def _pass_on(event: asyncio.Event, to: Sequence[asyncio.Event]) -> NoReturn:
    """Sets all of `to` whenever `event` is set, and clears it."""
    while True:
        await event.wait()
        event.clear()
        for other in to:
            other.set()


def _name(role: router_pb2.Role.ValueType) -> str:
    return router_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def hello(worker: Worker, role: router_pb2.Role.ValueType, address: str) -> router_pb2.Hello:
    """Introduces the worker, under an id of its own."""
    engine = worker.engine
    return router_pb2.Hello(
        member_id=uuid.uuid4().hex,
        role=role,
        address=address,
        host_id=worker.config.host,
        model_name=worker.config.served_name,
        spec=spec_to_message(worker.spec),
        max_model_len=engine.max_model_len,
        max_running=worker.config.engine.max_running,
        kv_capacity_tokens=engine.stats().total_pages * engine.spec.block_size,
        routers=len(worker.config.router),
        version=own_version(),
        wire=WIRE,
    )


def load(worker: Worker) -> router_pb2.Load:
    """The present load."""
    stats = worker.stats()
    base_s, sequence_s, token_s = stats.step_cost
    own_s, context_s = stats.prompt_cost
    allowed_s = limit_s(stats, worker.config.step_limit_s)
    return router_pb2.Load(
        running=stats.running,
        waiting=stats.waiting,
        queued_prefill_tokens=stats.queued_tokens,
        free_kv_tokens=stats.roomy_pages * worker.engine.spec.block_size,
        yielding=stats.yielding,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        step=router_pb2.StepCost(base_s=base_s, sequence_s=sequence_s, token_s=token_s) if base_s else None,
        fetch_bytes_per_s=worker.rates.near.bytes_per_s,
        remote_bytes_per_s=worker.rates.far.bytes_per_s,
        fetch_overhead_s=worker.rates.near.overhead_s,
        remote_overhead_s=worker.rates.far.overhead_s,
        progress=router_pb2.Progress(steps=stats.steps, in_step_s=stats.in_step_s, limit_s=allowed_s),
        handoff=_cost(worker.handoffs.near),
        far_handoff=_cost(worker.handoffs.far),
        prompt=router_pb2.PromptTokenCost(token_s=own_s, context_s=context_s) if own_s else None,
        store_away=not worker.store.connected,
        counts=_counts(worker, stats),
    )


def _counts(worker: Worker, stats: EngineStats) -> router_pb2.WorkerCounts:
    given = worker.metrics.given
    return router_pb2.WorkerCounts(
        prompts=router_pb2.PromptSources(**{source: given[source] for source in _SOURCES}),
        generated=stats.generated_tokens,
        drafted=stats.drafts.drafted,
        accepted=stats.drafts.accepted,
        resident_blocks=stats.resident_pages,
        block_bytes=worker.engine.spec.block_bytes,
    )


def _cost(measured: TransferCost) -> router_pb2.TransferCost | None:
    """None: nothing was measured. As long as the overhead is not known apart, it is part of the bytes."""
    if not measured.bytes_per_s:
        return None
    return router_pb2.TransferCost(
        overhead_s=max(measured.overhead_s, _NO_OVERHEAD_S), bytes_per_s=measured.bytes_per_s
    )
