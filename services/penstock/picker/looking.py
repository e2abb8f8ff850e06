"""What the picker knows of the mesh: gateways that take requests, and how long workers' queues are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.rpc.channels import Channels
from penstock.v1 import router_pb2, router_pb2_grpc

_ANSWER_S = 1.0
_KNOWN_S = 10.0
_DECODE = (router_pb2.ROLE_DECODE, router_pb2.ROLE_BOTH)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOWHERE = ("0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True)
class MeshSight:
    """The mesh at one look."""

    gateways: tuple[str, ...] = ()
    """HTTP addresses of those that take requests."""
    queue_s: float | None = None
    """The shortest queue of a worker that decodes; None: there is no such worker."""


class Lookout:
    """Looks at the mesh again and again. Belongs to one event loop."""

    def __init__(self, routers: Sequence[str], look_s: float, channels: Channels, doors: Channels) -> None:
        self._routers = routers
        self._look_s = look_s
        self._channels = channels
        self._doors = doors
        """To gateways, whose doors are for clients."""
        self._named: dict[str, tuple[router_pb2.MeshWatcher, float]] = {}
        """By address: gateways, and when a router has named them."""
        self._strange: set[str] = set()
        self._log = structlog.get_logger("penstock.picker")
        self.seen = MeshSight()
        self.answered = asyncio.Event()
        """A router has answered."""

    async def follow(self) -> NoReturn:
        """Keeps looking. What was seen last stays when no router answers: gateways may serve all the same."""
        while True:
            told = await self._ask()
            if told is not None:
                self.seen = MeshSight(await self._ready(self._lately(told.gateways)), _shortest(told.members))
                self.answered.set()
            await asyncio.sleep(self._look_s)

    async def _ask(self) -> router_pb2.MembersResponse | None:
        for router in self._routers:
            stub = router_pb2_grpc.RouterStub(self._channels.to(router, "router"))
            try:
                return await stub.Members(router_pb2.MembersRequest(), timeout=_ANSWER_S)
            except grpc.aio.AioRpcError as error:
                self._log.debug("a router does not answer", router=router, reason=error.details())
        return None

    def _lately(self, gateways: Sequence[router_pb2.MeshWatcher]) -> Sequence[router_pb2.MeshWatcher]:
        """These gateways, and those that routers have named of late, whom one that starts again does not know at first:
        if they can be asked whether they take requests, or it knows none."""
        now = time.monotonic()
        self._named |= {one.address: (one, now) for one in gateways}
        self._named = {address: (one, at) for address, (one, at) in self._named.items() if now - at < _KNOWN_S}
        return [one for one, at in self._named.values() if at == now or not one.tls or not gateways]

    async def _ready(self, gateways: Sequence[router_pb2.MeshWatcher]) -> tuple[str, ...]:
        known = {one.http_address: one for one in gateways if self._reachable(one.http_address)}
        well = await asyncio.gather(*map(self._takes_requests, known.values()))
        return tuple(sorted(address for address, serves in zip(known, well, strict=True) if serves))

    async def _takes_requests(self, gateway: router_pb2.MeshWatcher) -> bool:
        """One that drains, or has no workers, takes none. With TLS its own word has to do: that it watches a router."""
        if gateway.tls:
            return True
        stub: Any = health_pb2_grpc.HealthStub(self._doors.to(gateway.address, "gateway"))
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == _SERVING)

    def _reachable(self, address: str) -> bool:
        if not address.startswith(_NOWHERE):
            return True
        if address not in self._strange:
            self._strange.add(address)
            self._log.warning("a gateway does not say where it is: give it an address of its own", address=address)
        return False


def _shortest(members: Sequence[router_pb2.JoinedMember]) -> float | None:
    queues = (one.queue_s for one in members if one.role in _DECODE and not one.draining and not one.silent)
    return min(queues, default=None)
