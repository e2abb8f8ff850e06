"""What `penstock ctl doctor` learns by asking one service."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence

import grpc

from penstock.cli.asking import DoorAccess, members
from penstock.cli.checks import CheckedService
from penstock.errors import Forbidden, InvalidRequest, PenstockError, Unauthenticated
from penstock.rpc.channels import Channels
from penstock.rpc.errors import from_rpc
from penstock.rpc.identity import MemberRole
from penstock.rpc.shown.figures import role_of
from penstock.runtime.addresses import UnixPath, socket_address
from penstock.v1 import checkup_pb2, checkup_pb2_grpc, router_pb2, router_pb2_grpc

_CALL_S = 5.0
_JOINING: Sequence[MemberRole] = ("worker", "store", "router", "draft", "stage", "gateway")
"""The roles of who may not have joined."""


async def visited_router(address: str, channels: Channels) -> CheckedService:
    """A router and what it knows."""
    visit = CheckedService(f"router {address}")
    if await _resolved(visit, address):
        channel = channels.to(address, "router")
        right = "start it, or correct --router; a router listens at its --address, by default on this host alone"
        if await _examined(visit, channel, right):
            try:
                visit.found = await members(router_pb2_grpc.RouterStub(channel))
            except grpc.aio.AioRpcError as failed:
                visit.note("members", False, from_rpc(failed).message, "is that the address of a router?")
    return visit


async def visited_member(member: router_pb2.JoinedMember, channels: Channels) -> CheckedService:
    """A worker or a store that has joined."""
    visit = CheckedService(f"{role_of(member)} {member.address}")
    if member.silent:
        right = "look into its log; `penstock up` and Kubernetes start one again whose step does not end"
        visit.note("silent", False, "the router has heard nothing of it, or its step does not end", right)
    role: MemberRole = "store" if member.role == router_pb2.ROLE_KVSTORE else "worker"
    return await _visited(visit, member.address, channels, role)


async def visited_draft(address: str, channels: Channels) -> CheckedService:
    """A draft service."""
    return await _visited(CheckedService(f"draft {address}"), address, channels, "draft")


async def visited_service(address: str, channels: Channels) -> CheckedService:
    """A service of which only the address is known; where services show each other certificates, of whatever role."""
    for role in _JOINING if channels.member is not None else _JOINING[:1]:
        visit = await _visited(CheckedService(f"service {address}"), address, channels, role)
        if visit.version:
            break
    return visit


async def _visited(visit: CheckedService, address: str, channels: Channels, role: MemberRole) -> CheckedService:
    if await _resolved(visit, address):
        right = "open its port to the other hosts, or have it say another address with --advertise"
        await _examined(visit, channels.to(address, role), right)
    return visit


async def visited_gateway(gateway: router_pb2.MeshWatcher, door: DoorAccess) -> CheckedService:
    """A gateway, and whether it accepts the operator's key."""
    visit = CheckedService(f"gateway {gateway.address}")
    if not await _resolved(visit, gateway.address):
        return visit
    try:
        metadata = door.metadata(gateway)
        async with door.channel(gateway) as channel:
            right = "open its gRPC port to this host; where it speaks TLS, name who signed its certificate with --ca"
            if await _examined(visit, channel, right, metadata):
                visit.note("credentials", True, "the key is accepted" if metadata else "it asks for no key")
    except InvalidRequest as error:
        visit.note("credentials", False, error.message, "see the command's --key-file and --gateway")
    return visit


async def _resolved(visit: CheckedService, address: str) -> bool:
    """Whether the name of the address is known, which a Unix socket does not have."""
    where = socket_address(address)
    if isinstance(where, UnixPath):
        return True
    host = where.host
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        right = "correct the name, or have DNS or /etc/hosts know it on this host"
        visit.note("address", False, f"{host} is not known: {error.strerror or error}", right)
        return False
    return True


async def _examined(
    visit: CheckedService, channel: grpc.aio.Channel, advice: str, metadata: Sequence[tuple[str, str]] = ()
) -> bool:
    """Asks a service what it finds where it runs; `advice` is for one that does not answer."""
    began, wall = time.monotonic(), time.time()
    try:
        said = await checkup_pb2_grpc.CheckupStub(channel).Examine(
            checkup_pb2.ExamineRequest(), timeout=_CALL_S, metadata=tuple(metadata)
        )
    except grpc.aio.AioRpcError as failed:
        _failed(visit, failed, advice)
        return False
    took = time.monotonic() - began
    visit.version, visit.way_s = said.version, took / 2
    # It reads its clock when its answer leaves, so at most the way back lies behind.
    visit.ahead_s = said.clock - (wall + took / 2)
    visit.note("address", True, f"answers in {took * 1e3:.0f} ms")
    for one in said.findings:
        visit.note(one.check, one.ok, one.found, one.advice)
    return True


def _failed(visit: CheckedService, failed: grpc.aio.AioRpcError, advice: str) -> None:
    error: PenstockError = from_rpc(failed)
    if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
        right = "bring it to this version, or correct the address: it is none of the mesh's services, or an older one"
        visit.note("address", False, "it answers, and knows no check-up", right)
    elif isinstance(error, Unauthenticated | Forbidden):
        right = (
            "give an operator's key with --key-file or PENSTOCK_CTL_KEY; `penstock keys add NAME --operator` makes one"
        )
        visit.note("credentials", False, error.message, right)
    else:
        visit.note("address", False, f"does not answer: {error.message}", advice)
