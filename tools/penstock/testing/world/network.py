"""A network between pretended processes: it delays, and connections break with what is on its way.

As TCP and HTTP/2 have it: within one call nothing is lost, doubled or overtaken while its connection stands; calls
overtake each other. A connection breaks for all of its calls; each side learns of it for itself, and of what was on the
way all or nothing arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from penstock.testing.world.virtual import PretendProcess, VirtualLoop

_CONNECT_S = 5.0
"""As `grpc.min_reconnect_backoff_ms` has it for every attempt."""
_NEXT_S = 1e-6
"""Between two messages of one call, at least."""


class CallingSide(Protocol):
    """A call, at its client."""

    method: str

    def opened(self, connection: PretendConnection) -> None:
        """The connection that it waits for stands."""

    def unreachable(self, why: str) -> None:
        """It does not come about."""

    def broke(self, wire: Wire) -> None:
        """It has broken."""

    def hear(self, wire: Wire, message: bytes) -> None:
        """An answer has arrived."""

    def hear_end(self, wire: Wire, end: Any) -> None:
        """The server has ended the call."""


class ServingSide(Protocol):
    """A call, at its server."""

    def hear(self, message: bytes | None) -> None:
        """A request has arrived; None: that there is none any more."""

    def gone(self) -> None:
        """Nobody waits for answers any more."""


class Listens(Protocol):
    """What listens at an address."""

    process: PretendProcess

    def accept(self, wire: Wire, method: str, metadata: Any, left_s: float | None) -> None:
        """A call has come, with so many seconds until its deadline."""


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How good a network is."""

    delay_s: float = 0.001
    """Of most messages; each takes between half and one and a half of it."""
    late: float = 0.02
    """Share of those that take longer."""
    late_s: float = 0.05
    """How much longer, at most."""


@dataclass(slots=True)
class PretendWay:
    """Between two processes, by their names: both directions."""

    held_until: float = 0.0
    """Nothing arrives before."""


Event = tuple[float, str, str, str, object]
"""When, from whom, to whom, what, and something to tell it from others."""


class Network:
    """All that is between processes."""

    def __init__(self, loop: VirtualLoop, random: Random, weather: Weather) -> None:
        self.loop = loop
        self.random = random
        self.trace: list[Event] = []
        """All that was sent, in order."""
        self.servers: dict[str, Listens] = {}
        """By address."""
        self.connections: list[PretendConnection] = []
        """That are not broken."""
        self._weather = weather
        self._ways: dict[frozenset[str], PretendWay] = {}

    def way(self, one: PretendProcess, other: PretendProcess) -> PretendWay:
        """Between two processes, or those that take their names."""
        return self._ways.setdefault(frozenset((one.name, other.name)), PretendWay())

    def arrival(self, way: PretendWay) -> float:
        """When what is sent now arrives."""
        weather, random = self._weather, self.random
        took = weather.delay_s * (0.5 + random.random())
        if random.random() < weather.late:
            took += weather.late_s * random.random()
        return max(self.loop.now, way.held_until) + took

    def connect(self, client: PretendProcess, address: str, reached: Callable[[bool], None]) -> PretendConnection:
        """A new connection; `reached` is told whether it leads anywhere."""
        connection = PretendConnection(self, client, self.servers.get(address), reached)
        self.connections.append(connection)
        return connection

    def hold(self, one: PretendProcess, other: PretendProcess, seconds: float) -> None:
        """For so long nothing arrives between two processes; then all of it does."""
        self.way(one, other).held_until = self.loop.now + seconds

    def cut(self, one: PretendProcess, other: PretendProcess) -> None:
        """Breaks the connections between two processes."""
        for connection in [*self.connections]:
            if connection.joins(one, other):
                connection.break_off()

    def end(self, process: PretendProcess) -> None:
        """Nobody is there any more at its end of its connections, and at its addresses."""
        self.servers = {address: server for address, server in self.servers.items() if server.process is not process}
        for connection in [*self.connections]:
            if connection.of(process):
                connection.break_off()


class PretendConnection:
    """From a client to a server."""

    def __init__(
        self,
        network: Network,
        client: PretendProcess,
        server: Listens | None,
        reached: Callable[[bool], None],
    ) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.way = network.way(client, server.process) if server is not None else PretendWay()
        self.ready = False
        self.broken = False
        self.closed = False
        """No new calls."""
        self.loses = network.random.random() < 0.5
        """Whether what is on its way is lost when it breaks."""
        self.wires: dict[Wire, None] = {}
        self.waiting: dict[CallingSide, None] = {}
        """Calls that wait for it to stand."""
        self._told = reached
        loop = network.loop
        if server is None:
            loop.call_at(network.arrival(self.way), self._refused, context=client.context)
            return
        # A server that is stopped lets connections come, and says nothing to them.
        loop.call_at(network.arrival(self.way), self._reached, context=server.process.context)
        loop.call_later(_CONNECT_S, self._refused, context=client.context)

    def of(self, process: PretendProcess) -> bool:
        """Whether one of its ends is there."""
        return self.client is process or (self.server is not None and self.server.process is process)

    def joins(self, one: PretendProcess, other: PretendProcess) -> bool:
        """Whether it is between these two."""
        return self.of(one) and self.of(other)

    def _reached(self) -> None:
        if not self.broken:
            network = self.network
            network.loop.call_at(network.arrival(self.way), self._stands, context=self.client.context)

    def _stands(self) -> None:
        if self.broken:
            return
        self.ready = True
        self._told(True)
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.opened(self)

    def _refused(self) -> None:
        if not self.ready and not self.broken:
            self.broken = True
            self.close()
            self._give_up("failed to connect")

    def _give_up(self, why: str) -> None:
        self._told(False)
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.unreachable(why)

    def close(self) -> None:
        """No more calls; those that there are go on."""
        self.closed = True
        if self in self.network.connections:
            self.network.connections.remove(self)

    def break_off(self) -> None:
        """It is broken from now on; both ends learn of it."""
        if self.broken:
            return
        self.broken = True
        self.close()
        self.network.trace.append((self.network.loop.now, self.client.name, self._to, "breaks", self.loses))
        network, waiting = self.network, [*self.waiting]
        for wire in [*self.wires]:
            wire.break_off()
        if waiting:
            network.loop.call_at(
                network.arrival(self.way), self._give_up, "connection lost", context=self.client.context
            )

    @property
    def _to(self) -> str:
        return self.server.process.name if self.server is not None else "nobody"


@dataclass(eq=False, slots=True)
class Wire:
    """One call's part of a connection."""

    connection: PretendConnection
    server: Listens
    call: CallingSide
    served: ServingSide | None = None
    _up_at: float = 0.0
    _down_at: float = 0.0
    """When what was sent last arrives."""
    lasts: bool = field(default=True)
    """Until one side has ended the call."""

    def up(self, what: str, size: int, arrive: Callable[..., Any], *args: Any, sure: bool = False) -> None:
        """Sends something to the server: there `arrive` is called. `sure`: also over a broken connection."""
        self._up_at = max(self._up_at + _NEXT_S, self.connection.network.arrival(self.connection.way))
        self._send(self._up_at, self.server.process, what, size, (sure, arrive, args))

    def down(self, what: str, size: int, arrive: Callable[..., Any], *args: Any, sure: bool = False) -> None:
        """Likewise to the client."""
        self._down_at = max(self._down_at + _NEXT_S, self.connection.network.arrival(self.connection.way))
        self._send(self._down_at, self.connection.client, what, size, (sure, arrive, args))

    def _send(
        self,
        at: float,
        to: PretendProcess,
        what: str,
        size: int,
        then: tuple[bool, Callable[..., Any], tuple[Any, ...]],
    ) -> None:
        connection = self.connection
        network = connection.network
        sender = connection.client if to is not connection.client else self.server.process
        if connection.broken and not then[0]:
            return
        network.trace.append((network.loop.now, sender.name, to.name, f"{self.call.method} {what}", size))
        network.loop.call_at(at, self._arrive, *then, context=to.context)

    def _arrive(self, sure: bool, arrive: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if sure or not (self.connection.broken and self.connection.loses):
            arrive(*args)

    def break_off(self) -> None:
        """Both sides learn that the connection has broken, each in its time."""
        if self.served is not None:
            self.up("broke", 0, self.served.gone, sure=True)
        self.down("broke", 0, self.call.broke, self, sure=True)

    def over(self) -> None:
        """Nothing more is sent."""
        self.connection.wires.pop(self, None)


def ended(future: asyncio.Future[None] | None) -> None:
    """Wakes whoever waits for it."""
    if future is not None and not future.done():
        future.set_result(None)
