"""The mesh of a soak: real processes under their supervisor, all features on, two tenants and an operator."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from penstock.bench.e2e.running import free_port
from penstock.bench.soak.options import SoakOptions
from penstock.bench.soak.system import children_named
from penstock.cli.child import ChildSpec
from penstock.cli.mesh import MeshOptions, plan_mesh
from penstock.cli.ports import reserved_ports
from penstock.cli.redis_server import own_redis
from penstock.cli.running import serving
from penstock.cli.supervisor import ChildChange, ChildState, Patience, Supervisor, supervised
from penstock.cli.view import View
from penstock.engine.config import EngineSettings
from penstock.runtime.addresses import HostPort, SocketAddress, socket_address
from penstock.testing.keys import key_file
from penstock.testing.wires import MeshWires

TENANTS: Mapping[str, str] = {"key-of-ann": "ann", "key-of-bob": "bob"}
"""By key."""
OPERATOR = "key-of-ops"
REDIS = "redis"
_PLACES = 4
_HANDS_OFF = ("--local-prefill-tokens", "64")
"""Prompts of the embedded model are short, and some of them shall be computed elsewhere."""
_LOOKED_UP, _DRAFTED_FOR = 1 << 16, 1 << 13
"""Tokens of texts that a worker looks up drafts in, and those whose KV the draft service has room for. What is bounded
shall be full early: what grows later is a leak."""
_DISK_BYTES = 64 << 20
_MOST_LINES = 60
_LONGEST = 2000
_DEFECTS = ("Task was destroyed", "never retrieved", "background task failed")
_LOOK_S = 0.05
_BACK_S = 60.0


class NotBack(Exception):
    """A service that was struck has not come back."""


def places(options: SoakOptions) -> int:
    """Requests of a tenant at one time: more than all clients have, also when they have just left."""
    return _PLACES * options.clients


@dataclass(kw_only=True)
class SoakMesh:
    """Made by `soak_mesh`."""

    urls: Sequence[str]
    """Of the gateways."""
    metrics: Mapping[str, HostPort]
    """Where each service tells its metrics, by name."""
    routers: Mapping[str, SocketAddress]
    redis: bool
    ready: dict[str, bool] = field(default_factory=dict)
    """By name, of all services but Redis."""
    restarts: Counter[str] = field(default_factory=Counter)
    complaints: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_LINES))
    """The last errors that services have logged."""
    defects: list[str] = field(default_factory=list)
    """The first of them that say of a task that it failed, or was left behind."""
    stopped: set[str] = field(default_factory=set)
    """Services that stand still now."""
    supervisor: Supervisor | None = None

    @property
    def services(self) -> list[str]:
        """The names of all."""
        return [*self.metrics, *([REDIS] if self.redis else [])]

    @property
    def gateways(self) -> list[HostPort]:
        """Their addresses."""
        return [HostPort(url.removeprefix("http://")) for url in self.urls]

    def pids(self) -> dict[str, int]:
        """Of the processes that run now, by name."""
        assert self.supervisor is not None
        found = self.supervisor.pids()
        for pid in children_named("redis-server") if self.redis else ():
            found[REDIS] = pid
        return found

    def up(self, *services: str) -> bool:
        """Whether these are there and go on; all without names."""
        for name in services or self.services:
            if name in self.stopped or not self.ready.get(name, name == REDIS and name in self.pids()):
                return False
        return True

    async def until_up(self, *services: str) -> None:
        """Returns when these are there; all without names. Raises NotBack after a long time."""
        try:
            async with asyncio.timeout(_BACK_S):
                while not self.up(*services):  # noqa: ASYNC110 - Redis tells nobody when it is back
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            away = ", ".join(name for name in services or self.services if not self.up(name))
            raise NotBack(f"after {_BACK_S:.0f} s not there: {away}; {' | '.join([*self.complaints][-5:])}") from None

    def gone(self, service: str) -> None:
        """It is being killed; its supervisor will say when there is another one."""
        if service in self.ready:
            self.ready[service] = False

    def heard(self, change: ChildChange) -> None:
        """A child's state has changed."""
        self.ready[change.name] = change.state is ChildState.READY
        if change.state is ChildState.DOWN:
            self.restarts[change.name] += 1

    def said(self, name: str, line: str) -> None:
        """A child has written a line."""
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"level": "error"}
        if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
            told = f"{name}: {line[:_LONGEST]}"
            self.complaints.append(told)
            if any(mark in line for mark in _DEFECTS) and len(self.defects) < _MOST_LINES:
                self.defects.append(told)


def blocks_of(directory: Path) -> Path:
    """Where the store of a mesh in that directory has its files."""
    return directory / "blocks"


@asynccontextmanager
async def soak_mesh(options: SoakOptions, directory: Path, wires: MeshWires | None = None) -> AsyncIterator[SoakMesh]:
    """A mesh that serves, for the length of the block; its files are in `directory`. Without redis-server its routers
    share nothing. Services and clients reach each other through `wires`, where there are any."""
    has_redis = shutil.which("redis-server") is not None and find_spec("redis") is not None
    patience = Patience(stop_s=10.0, first_backoff_s=0.1, last_backoff_s=0.5, hung_s=options.hung_s, stuck_s=60.0)
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(reserved_ports())
        redis = ""
        if has_redis:
            quiet = View("error", Console(quiet=True))
            redis = await stack.enter_async_context(own_redis(quiet, patience))
        plan = plan_mesh(_mesh_options(options, directory), ports, redis=redis)
        terms = directory / "terms.toml"
        terms.write_text(f"[limits.default]\nconcurrency = {places(options)}\nrequests_per_minute = 1000000\n")
        metrics = {child.name: HostPort(f"127.0.0.1:{free_port()}") for child in plan.children}
        children = [_told(child, metrics[child.name], terms) for child in plan.children]
        routers = {child.name: _address(child) for child in children if child.name.startswith("router")}
        urls = [plan.url, *plan.others]
        if wires is not None:
            children = await wires.around(children)
            doors = [HostPort(url.removeprefix("http://")) for url in urls]
            urls = [f"http://{await wires.door(f'gateway-{number}', door)}" for number, door in enumerate(doors)]
        mesh = SoakMesh(urls=urls, metrics=metrics, routers=routers, redis=has_redis)
        supervisor = await stack.enter_async_context(supervised(children, mesh.heard, mesh.said, patience))
        mesh.supervisor = supervisor
        await supervisor.ready()
        for url in mesh.urls:
            await serving(url)
        yield mesh


def _mesh_options(options: SoakOptions, directory: Path) -> MeshOptions:
    server_key = directory / "server.key"
    server_key.write_text(secrets.token_hex(32))
    for place in (blocks_of(directory), directory / "batches"):
        place.mkdir()
    return MeshOptions(
        port=0,
        prefill=options.prefill,
        decode=options.decode,
        routers=2,
        gateways=2,
        kv_host_bytes=options.store_bytes,
        kv_nvme_dir=blocks_of(directory),
        kv_nvme_bytes=_DISK_BYTES,
        batch_store=str(directory / "batches"),
        api_keys=key_file(directory / "keys.json", TENANTS, operators=[OPERATOR]),
        server_key_file=server_key,
        hung_s=options.hung_s,
        log_level="warning",
        engine=EngineSettings(lookup_tokens=_LOOKED_UP),
    )


def _told(child: ChildSpec, metrics: HostPort, terms: Path) -> ChildSpec:
    """With the settings that `up` has not."""
    more: tuple[str, ...] = ("--metrics-address", metrics)
    if child.name.startswith("router"):
        more += _HANDS_OFF
    if child.name.startswith("gateway"):
        more += ("--terms", str(terms))
    if child.name.startswith("draft"):
        more += ("--kv-pool-tokens", str(_DRAFTED_FOR))
    return replace(child, command=(*child.command, *more))


def _address(child: ChildSpec) -> SocketAddress:
    return socket_address(child.command[child.command.index("--address") + 1])
