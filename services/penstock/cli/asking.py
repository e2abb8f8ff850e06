"""How the commands of `penstock ctl` reach routers and gateways, and end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import grpc
from cyclopts import Parameter

from penstock.errors import DeadlineExceeded, InvalidRequest, PenstockError, Unavailable
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.errors import from_rpc, is_raised
from penstock.rpc.identity import MemberIdentity
from penstock.runtime.addresses import HostPort, is_loopback, socket_address
from penstock.runtime.config import Addresses
from penstock.v1 import gateway_pb2_grpc, router_pb2, router_pb2_grpc

AsJson = Annotated[bool, Parameter(name="--json")]
CALL_S = 10.0
_NO_ROUTER = "--router: must be the address of a router, for example 127.0.0.1:7401"
_Answer = TypeVar("_Answer")
Asking = Callable[["router_pb2_grpc.RouterAsyncStub"], Awaitable[_Answer]]
"""Asks one router."""


@dataclass(frozen=True, kw_only=True)
class MeshAccess:
    """The way to the routers."""

    router: Annotated[Addresses, Parameter(name=("--router", "-r"))] = ()
    """Address of a router, host:port or unix:/path; of several, with commas between them, the first that answers is
    asked, or all where each knows a part."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue operator`, where the services of the mesh show each other certificates."""

    def channels(self) -> AbstractAsyncContextManager[Channels]:
        """Channels to all services, for the length of the block. Raises ConfigError."""
        return open_channels(MemberIdentity.of(self.member_tls))


@dataclass(frozen=True, kw_only=True)
class DoorAccess:
    """The way to the gateways, and an operator's key."""

    gateway: Addresses = ()
    """Address of a gateway's gRPC API, host:port, or several with commas between them. Default: those that the router
    knows."""
    key: Annotated[str, Parameter(show_default=False)] = field(default="", repr=False)
    """An operator's key, where gateways ask for keys; better in the environment (PENSTOCK_CTL_KEY) or in a file."""
    key_file: Path | None = None
    """A file with that key."""
    ca: Path | None = None
    """The PEM file of the authority that signed the gateways' certificates. Default: those that the system trusts."""

    def metadata(self, door: router_pb2.MeshWatcher) -> tuple[tuple[str, str], ...]:
        """The credentials of a call to a gateway. Raises InvalidRequest, also where a router alone says that there is a
        gateway, elsewhere and without TLS: who can tell a router so would be sent the key in clear."""
        key = self.key
        if self.key_file is not None:
            key = _read("--key-file", self.key_file).decode().strip()
        if not key:
            return ()
        safe = door.tls or self.ca is not None or door.address in self.gateway
        where = socket_address(door.address)
        if not safe and isinstance(where, HostPort) and not is_loopback(where.host):
            right = f"name it with --gateway {door.address} if it is yours and the network is safe"
            raise InvalidRequest(f"the key is not sent to {door.address}, which speaks no TLS: {right}")
        return (("authorization", f"Bearer {key}"),)

    @asynccontextmanager
    async def channel(self, door: router_pb2.MeshWatcher) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to a gateway. Raises InvalidRequest."""
        if not door.tls and self.ca is None:
            async with grpc.aio.insecure_channel(door.address) as channel:
                yield channel
            return
        roots = None if self.ca is None else _read("--ca", self.ca)
        async with grpc.aio.secure_channel(door.address, grpc.ssl_channel_credentials(roots)) as channel:
            yield channel

    async def doors(self, mesh: MeshAccess) -> list[router_pb2.MeshWatcher]:
        """The gateways. Raises PenstockError when there is none."""
        if self.gateway:
            return [router_pb2.MeshWatcher(address=address) for address in self.gateway]
        found = list((await of_first(mesh, members)).gateways)
        if not found:
            raise Unavailable("no gateway watches that router; name one with --gateway HOST:PORT, its gRPC address")
        return found

    @asynccontextmanager
    async def gateway_at(self, door: router_pb2.MeshWatcher) -> AsyncIterator[Any]:
        """A stub of the gateway; the errors of calls within the block become PenstockErrors."""
        async with self.channel(door) as channel:
            try:
                yield gateway_pb2_grpc.GatewayStub(channel)
            except grpc.aio.AioRpcError as failed:
                raise from_rpc(failed) from failed


Door = Annotated[DoorAccess | None, Parameter(name="*")]
Mesh = Annotated[MeshAccess, Parameter(name="*")]
NOWHERE = MeshAccess()


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{option} = {str(path)!r}: cannot be read: {error.strerror}") from None


async def members(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.MembersResponse:
    """What a router knows of the mesh."""
    return await stub.Members(router_pb2.MembersRequest(), timeout=CALL_S)


async def of_first(mesh: MeshAccess, ask: Asking[_Answer]) -> _Answer:
    """The answer of the first router that can be reached. Raises PenstockError."""
    error: PenstockError = Unavailable(_NO_ROUTER)
    async with mesh.channels() as channels:
        for router in mesh.router:
            stub: Any = router_pb2_grpc.RouterStub(channels.to(router, "router"))
            try:
                return await ask(stub)
            except grpc.aio.AioRpcError as failed:
                error = from_rpc(failed)
                if isinstance(error, DeadlineExceeded) and not is_raised(failed):
                    error = Unavailable(f"the router at {router} does not answer")
                if not isinstance(error, Unavailable):
                    break
    raise error


async def of_all(mesh: MeshAccess, ask: Asking[_Answer]) -> list[_Answer]:
    """The answers of all routers that can be reached. Raises PenstockError when none can, or one refuses."""
    answers, fault = [], None
    for router in mesh.router:
        try:
            answers.append(await of_first(replace(mesh, router=(router,)), ask))
        except Unavailable as error:
            fault = error
    if not answers:
        raise fault or Unavailable(_NO_ROUTER)
    return answers


def done(
    asking: Coroutine[Any, Any, _Answer],
    show: Callable[[_Answer], object],
    plain: Callable[[_Answer], Any],
    *,
    as_json: bool,
    code: Callable[[_Answer], int] = lambda found: 0,
) -> int:
    """Shows what was found, or writes it as JSON. Returns the exit code, by `code` of what was found."""
    try:
        found = asyncio.run(asking)
    except PenstockError as error:
        print(f"penstock ctl: {error.message}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(plain(found), indent=2))
    else:
        show(found)
    return code(found)
