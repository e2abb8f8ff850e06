"""Serving: one listener with health, reflection, an admission limit and an ordered drain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.rpc.checkup import CHECKUP, CheckupService, Examine, nothing_more
from penstock.rpc.guard import by_role
from penstock.rpc.health import HealthService
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.interceptors import CallEntrance, InFlight, ServerInterceptor, no_entrance
from penstock.runtime.addresses import UNIX
from penstock.runtime.config import ConfigError
from penstock.runtime.ports import ports_are_reserved
from penstock.v1 import checkup_pb2_grpc

MAX_MESSAGE = 4 * 1024 * 1024
"""grpc's own default. Bulk bytes travel in chunks of at most 1 MiB, so it is never raised."""

KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)
"""For servers and channels: a peer that answers nothing for 15 s is gone. In grpcio 1.85 the last option decides; its
default is a minute."""
GONE_S = 15.0
"""The same where no ping gets through: a Unix socket that is full, as nobody reads it, says nothing of its peer."""
_SPARE_STREAMS = 64
"""Streams of one connection beyond the calls that the server takes, so that a refusal is heard at once."""

_MOST_UNREAD = 4096
"""Calls of strangers that have ended, and whose ends their clients have not read."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 * 1024),
    *KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

LIVE = "penstock.live"
"""Name in `grpc.health.v1` under which a server says whether it works, or has to be started again. The other names say
whether it takes requests: a server that drains, or waits for others, takes none and is live."""


class RpcServer:
    """A bound, running server. Made by `serve`."""

    def __init__(
        self, server: grpc.aio.Server, health: HealthService, names: Sequence[str], live_names: Sequence[str] = ()
    ) -> None:
        self._server = server
        self._health = health
        self._names = ("", *names)
        self._live_names = (LIVE, *live_names)
        self.port = 0
        self.in_flight = InFlight()

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer of `grpc.health.v1`, for the server as a whole and for each of its services."""
        for name in self._names:
            self._health.set(name, serving)

    async def set_live(self, live: bool) -> None:
        """Sets the answer of `grpc.health.v1` for LIVE and its other names, which is true from the start."""
        for name in self._live_names:
            self._health.set(name, live)


@asynccontextmanager
async def serve(
    address: str,
    register: Callable[[grpc.aio.Server], None],
    names: Sequence[str],
    *,
    max_calls: int = 1024,
    max_streams: int | None = None,
    grace: float = 5.0,
    credentials: grpc.ServerCredentials | None = None,
    member: MemberIdentity | None = None,
    entrance: CallEntrance = no_entrance,
    examine: Examine = nothing_more,
    live_names: Sequence[str] = (),
    first_s: float | None = None,
    stall_s: float | None = None,
    reflects: bool = True,
) -> AsyncIterator[RpcServer]:
    """Serves on `address` ("127.0.0.1:0" picks a port) until the block ends, then drains.

    `register` adds the servicers; `names` are their full names, for health and reflection. Calls beyond
    `max_calls` are answered with RESOURCE_EXHAUSTED at once. One connection may have `max_streams` calls open
    (default: a few more than `max_calls`); further ones wait at the client. Leaving the block answers NOT_SERVING,
    gives running calls `grace` seconds, cancels the rest, and returns when the last handler has cleaned up.
    Streams that watch its health do not count as running: they hear NOT_SERVING, and end.
    With `credentials` it speaks TLS. As a `member` it asks callers for certificates of the mesh, and lets each call
    what its role may (`penstock.rpc.methods`); a Unix socket needs none, as its directory says who may enter.
    `entrance` surrounds each call of the servicers, and is entered before a long request of it is parsed. `examine`
    finds out, beside what every server does, whether the place where it runs is fit. `live_names` are further names for
    LIVE. `first_s`, for a server that strangers reach: seconds until the first message of a call has to be there, and
    health and reflection have a few callers at a time. `stall_s`, likewise: seconds in which a client has to take a
    reply of a stream; a call that has ended and is not read to its end counts as none of `max_calls`. `reflects`:
    callers may ask what there is to call.
    Raises ConfigError when it cannot listen on `address`.
    """
    in_flight = InFlight()
    if address.startswith(UNIX):
        member = None
    if member is not None:
        credentials, entrance = member.server(), by_role
    server = grpc.aio.server(
        interceptors=[ServerInterceptor(in_flight, entrance, first_s=first_s, stall_s=stall_s, most=max_calls)],
        # Without a bound one connection can open so many streams, and reset them, that the process does nothing else.
        options=(
            *_OPTIONS,
            ("grpc.max_concurrent_streams", max_streams or max_calls + _SPARE_STREAMS),
            ("grpc.so_reuseport", int(ports_are_reserved())),
        ),
        maximum_concurrent_rpcs=max_calls + (0 if stall_s is None else _MOST_UNREAD),
    )
    health = HealthService()
    running = RpcServer(server, health, names, live_names)
    running.in_flight = in_flight
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    checkup_pb2_grpc.add_CheckupServicer_to_server(CheckupService(examine), server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    if member is None and reflects:
        reflection.enable_server_reflection([*names, CHECKUP, health_name], server)
    running.port = _bind(server, address, credentials)
    await running.set_serving(False)
    await running.set_live(True)
    await server.start()
    try:
        yield running
    finally:
        await running.set_serving(False)
        health.end()
        await server.stop(grace)
        await in_flight.idle()


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            "address", address, "cannot listen there: it is taken, or not an address of this host"
        ) from error
