"""Does what was decided: tells workers by way of a router, and has the actuator start and end them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

import structlog

from penstock.cli.asking import CALL_S, MeshAccess, of_first
from penstock.cli.scale.actuators.base import Actuator, ActuatorFailed, WorkerPlace
from penstock.cli.scale.metrics import ScaleMetrics
from penstock.cli.scale.state import ROLES, ScaleAction, WorkerSeen, WorkRole
from penstock.errors import NotFound, PenstockError
from penstock.v1 import router_pb2, router_pb2_grpc

_FIRST_PAUSE_S, _LAST_PAUSE_S = 5.0, 300.0
"""Of the actuator after a failure; twice as long after each in a row."""
_LATE = 10.0
"""A worker that is not there after so many times the time of a start is not waited for any more."""
_LATE_S = 60.0
"""At least."""
_AWAY_S = 120.0
"""A worker that no router names may be back within so many seconds, and is the same then."""
_MISSED_S = 15.0
"""For so long nothing is decided about a mesh in which one is missing: its router may know only some again."""
_ROLES: Mapping[WorkRole, router_pb2.Role.ValueType] = {
    "prefill": router_pb2.ROLE_PREFILL,
    "decode": router_pb2.ROLE_DECODE,
}
_LOG = structlog.get_logger("penstock.scale")


class ScaleActs:
    """Owner of what was ordered and has not come."""

    def __init__(
        self,
        mesh: MeshAccess,
        metrics: ScaleMetrics,
        clock: Callable[[], float],
        *,
        start_s: float,
    ) -> None:
        self._mesh = mesh
        self.metrics = metrics
        self._clock = clock
        self._late_s = max(_LATE * start_s, _LATE_S)
        self._orders: list[tuple[WorkRole, float]] = []
        """Roles, and when they were ordered, the oldest first."""
        self._known: set[str] | None = None
        """Workers that were there of late; None: there was no look."""
        self._away: dict[str, float] = {}
        """Those of them that the last look lacked, and since which look."""
        self._given_up: list[WorkRole] = []
        """Roles of orders that did not come in time, of which the actuator is not told yet."""
        self._gone: dict[str, float] = {}
        """Workers that the actuator has taken away and the router still knows, and since when."""
        self.drained: set[str] = set()
        """Workers that were told to drain, and were not taken away."""
        self._paused_until, self._pause_s = 0.0, _FIRST_PAUSE_S

    @property
    def gone(self) -> Set[str]:
        """Workers that the actuator has taken away, as long as the router still knows them."""
        return self._gone.keys()

    @property
    def can_use_actuator(self) -> bool:
        """Whether it has not failed just now."""
        return self._clock() >= self._paused_until

    def starting(self) -> Mapping[WorkRole, int]:
        """Workers that were ordered, by role."""
        now = self._clock()
        late = [order for order in self._orders if now - order[1] > self._late_s]
        for role, at in late:
            _LOG.warning("a worker that was ordered has not come", role=role, ordered_s=round(now - at, 1))
            self._orders.remove((role, at))
            self._given_up.append(role)
            self._fail("add")
        return Counter(role for role, _ in self._orders)

    async def settle(self, actuator: Actuator, places: Mapping[str, WorkerPlace]) -> None:
        """What was not done in time is not waited for: the actuator hears of orders that did not come, and workers that
        were taken away and are still there get work again, as another may have ended in the place of one. `places`: the
        workers that are there."""
        given_up, self._given_up = self._given_up, []
        for role in given_up:
            await actuator.give_up(role, {place.address for place in places.values()})
        now = self._clock()
        for worker in [id for id, since in self._gone.items() if now - since > self._late_s]:
            if not await self._try("undrain", self._tell(worker, router_pb2.MemberCommand(drain=False))):
                self.drained.add(worker)  # and it is told again at the next look
                continue
            _LOG.warning("a worker that was taken away is still there, and works again", worker=worker)
            self.drained.discard(worker)
            del self._gone[worker]
            if self._known is not None:
                self._known.add(worker)

    def lost(self, role: WorkRole) -> None:
        """One that was ordered could not start."""
        order = next((order for order in self._orders if order[0] == role), None)
        if order is not None:
            self._orders.remove(order)
            self._fail("add")

    async def welcome(self, workers: Sequence[WorkerSeen], listed: set[str]) -> None:
        """Workers that are new take the roles that were ordered. `listed`: all that the router knows."""
        now, known = self._clock(), self._known
        new = [one for one in workers if known is not None and one.id not in known]
        here = listed - self._gone.keys()
        self._away = {id: self._away.get(id, now) for id in known or () if id not in here}
        self._away = {id: since for id, since in self._away.items() if now - since < _AWAY_S}
        self._known = here | self._away.keys()
        self._gone = {id: since for id, since in self._gone.items() if id in listed}
        self.drained &= self._known
        for one in new:
            order = next((order for order in self._orders if order[0] == one.role), None) or next(
                iter(self._orders), None
            )
            if order is None:
                continue
            self._orders.remove(order)
            _LOG.info("a worker that was ordered has come", worker=one.id, role=order[0])
            if order[0] != one.role:
                await self._try("flip", self._tell(one.id, router_pb2.MemberCommand(role=_ROLES[order[0]])))

    def missing(self) -> bool:
        """Whether the last look lacked workers that were there a moment ago, and were not taken away."""
        return any(self._clock() - since < _MISSED_S for since in self._away.values())

    async def do(self, action: ScaleAction, places: Mapping[str, WorkerPlace], actuator: Actuator) -> None:
        """One action. What fails is logged and counted, and decided on again at the next look."""
        match action.kind:
            case "add":
                if self.can_use_actuator and await self._use("add", actuator.add(action.role)):
                    self._orders.append((action.role, self._clock()))
            case "remove":
                if self.can_use_actuator and await self._use("remove", actuator.remove(places[action.worker])):
                    self._gone[action.worker] = self._clock()
                    if self._known is not None:
                        self._known.discard(action.worker)
                    self.drained.discard(action.worker)
            case "flip":
                await self._try("flip", self._tell(action.worker, router_pb2.MemberCommand(role=_ROLES[action.role])))
            case "drain":
                if await self._try("drain", self._tell(action.worker, router_pb2.MemberCommand(drain=True))):
                    self.drained.add(action.worker)
            case "undrain":
                if await self._try("undrain", self._tell(action.worker, router_pb2.MemberCommand(drain=False))):
                    self.drained.discard(action.worker)

    async def bring_back(self) -> None:
        """Those that were drained and are still there get work again: nobody else would do that for them."""
        for worker in sorted(self.drained):
            await self._try("undrain", self._tell(worker, router_pb2.MemberCommand(drain=False)))
        self.drained.clear()

    async def _tell(self, worker: str, command: router_pb2.MemberCommand) -> None:
        request = router_pb2.CommandRequest(member=worker, command=command)

        async def tell(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.CommandResponse:
            return await stub.Command(request, timeout=CALL_S)

        await of_first(self._mesh, tell)

    async def _try(self, kind: str, telling: Awaitable[object]) -> bool:
        try:
            await telling
        except NotFound:
            return False  # it has left meanwhile
        except PenstockError as error:
            _LOG.warning("a worker was not told", kind=kind, reason=error.message)
            self.metrics.failures.labels(kind).inc()
            return False
        return True

    async def _use(self, kind: str, doing: Awaitable[object]) -> bool:
        try:
            await doing
        except ActuatorFailed as error:
            _LOG.warning("the actuator failed", kind=kind, reason=str(error), pause_s=self._pause_s)
            self._fail(kind)
            return False
        self._pause_s = _FIRST_PAUSE_S
        return True

    def _fail(self, kind: str) -> None:
        self.metrics.failures.labels(kind).inc()
        self._paused_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def show(self, workers: Sequence[WorkerSeen]) -> None:
        """As metrics."""
        starting = self.starting()
        for role in ROLES:
            self.metrics.present.labels(role).set(sum(one.role == role and one.ready for one in workers))
            self.metrics.starting.labels(role).set(starting.get(role, 0))
