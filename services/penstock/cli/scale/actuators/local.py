"""Processes of this host, started and kept as `penstock up` does it. They end with the planner, drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from penstock.cli.child import ChildSpec
from penstock.cli.mesh import MeshOptions, added_worker
from penstock.cli.ports import Ports, reserved_ports
from penstock.cli.scale.actuators.base import ActuatorFailed, WorkerPlace
from penstock.cli.scale.state import WorkRole
from penstock.cli.supervisor import ChildChange, ChildFailed, ChildState, Patience, supervised
from penstock.errors import PenstockError
from penstock.runtime.addresses import SocketAddress, UnixPath
from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import Failed, first_of, start

_LOG = structlog.get_logger("penstock.scale")


@dataclass(frozen=True, slots=True)
class StorePlace:
    """The store that new workers use; empty: they have none."""

    address: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMesh:
    """The mesh that workers are added to."""

    options: MeshOptions
    """Whose first model they serve, and as which they compute."""
    routers: tuple[SocketAddress, ...]
    store: Callable[[], Awaitable[StorePlace]]
    """Finds the store of this host. Raises PenstockError."""
    lost: Callable[[WorkRole], object]
    """Hears of a worker that was ordered and could not start."""
    failed: Failed
    most: int
    """Workers at one time, those that are being started again among them: else one that dies again and again would be
    made up for by more and more."""
    more: tuple[str, ...] = ()
    """Further options of the workers."""


@dataclass(slots=True)
class _Kept:
    """A worker of ours."""

    role: WorkRole
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    joined: bool = False
    """Whether a router has named it."""


class LocalActuator:
    """Owner of its workers. Made by `local_actuator`."""

    adds = True

    def __init__(self, mesh: LocalMesh, ports: Ports) -> None:
        self._mesh = mesh
        self._ports = ports
        self._kept: dict[str, _Kept] = {}
        """By address."""
        self._number = 0

    def removes(self, worker: WorkerPlace) -> bool:
        """Those that it has started: who started the others would start them again."""
        kept = self._kept.get(worker.address)
        if kept is not None:
            kept.joined = True
        return kept is not None

    async def add(self, role: WorkRole) -> None:
        """Starts one. Raises ActuatorFailed."""
        mesh = self._mesh
        if len(self._kept) >= mesh.most:
            raise ActuatorFailed(f"{len(self._kept)} local workers are kept already, though not all may be ready")
        try:
            store = await mesh.store()
            name = f"{role}-added-{self._number}"
            inside = isinstance(mesh.routers[0], UnixPath)  # as the mesh does it
            address = self._ports.socket(name) if inside else self._ports.reserve()
            spec = added_worker(
                mesh.options,
                role,
                address,
                routers=mesh.routers,
                store=store.address,
                name=name,
                host=store.host,
                more=mesh.more,
            )
        except (PenstockError, ConfigError, OSError) as error:
            raise ActuatorFailed(str(error)) from None
        spec = replace(spec, environment={**spec.environment, **self._ports.environment})
        self._number += 1
        kept = self._kept[address] = _Kept(role)
        keep = partial(self._keep, spec, address, role)
        kept.task = start(keep, name="added worker", on_failure="log", failed=mesh.failed)

    async def remove(self, worker: WorkerPlace) -> None:
        """Ends one; returns when its process has ended."""
        kept = self._kept.get(worker.address)
        if kept is None:
            raise ActuatorFailed(f"{worker.address} was started by somebody else")
        kept.stop.set()
        if kept.task is not None:
            await asyncio.wait([kept.task])

    async def give_up(self, role: WorkRole, joined: Set[str]) -> None:
        """Ends the oldest of those that have never joined, which still starts: its place is free when it has ended."""
        late = (kept for address, kept in self._kept.items() if kept.role == role and address not in joined)
        late = (kept for kept in late if not kept.joined)
        if (oldest := next((kept for kept in late if not kept.stop.is_set()), None)) is not None:
            oldest.stop.set()

    async def end(self) -> None:
        """Ends all."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for kept in self._kept.values():
            kept.stop.set()
        if tasks:
            await asyncio.wait(tasks)

    async def _keep(self, spec: ChildSpec, address: str, role: WorkRole) -> None:
        options, kept = self._mesh.options, self._kept[address]
        patience = Patience(stop_s=options.drain_s + 10.0, hung_s=options.hung_s, stuck_s=options.stuck_s)
        try:
            async with supervised([spec], self._changed, self._said, patience) as supervisor:
                await first_of(supervisor.ready(), kept.stop.wait())  # who is given up does not get ready any more
                await kept.stop.wait()
        except ChildFailed as error:
            _LOG.error("an added worker could not start", worker=spec.name, reason=str(error), said=error.tail[-3:])
            self._mesh.lost(role)
        finally:
            del self._kept[address]

    def _changed(self, change: ChildChange) -> None:
        if change.state in (ChildState.READY, ChildState.DOWN, ChildState.HUNG, ChildState.STUCK, ChildState.STOPPED):
            _LOG.info("an added worker", worker=change.name, state=change.state.value)

    def _said(self, name: str, line: str) -> None:
        _LOG.debug("an added worker says", worker=name, line=line)


@asynccontextmanager
async def local_actuator(mesh: LocalMesh) -> AsyncIterator[LocalActuator]:
    """Its workers end with the block."""
    with reserved_ports() as ports:
        actuator = LocalActuator(mesh, ports)
        try:
            yield actuator
        finally:
            await actuator.end()
