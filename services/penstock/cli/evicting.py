"""`penstock ctl evict`: has the mesh drop the blocks of one tenant."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from rich.console import Console
from rich.table import Table

from penstock.cli.asking import NOWHERE, AsJson, Door, DoorAccess, Mesh, MeshAccess, done
from penstock.cli.frames import counted, mib
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock.rpc.errors import is_raised
from penstock.rpc.shown.figures import Json, role_of, tier_name
from penstock.v1 import gateway_pb2, router_pb2

_CALL_S = 40.0
"""Stores look at all that they have."""


def evict(*, tenant: str, mesh: Mesh = NOWHERE, door: Door = None, as_json: AsJson = False) -> int:
    """Drops all blocks of a tenant from stores, from disks, and from the pages of workers and draft services. What a
    request uses just then stays where it is until that has ended, and is found no more. Blocks of others are not
    touched.

    Parameters
    ----------
    tenant:
        Its name, as in `penstock keys list`; without keys all clients are "default".
    as_json:
        Writes one JSON object instead of a table.
    """
    return done(
        _evict(tenant, mesh, door or DoorAccess()),
        _show,
        lambda found: found,
        as_json=as_json,
        code=lambda found: int(not all(member["answered"] for member in found["members"])),
    )


async def _evict(tenant: str, mesh: MeshAccess, door: DoorAccess) -> Json:
    answer = await _asked(gateway_pb2.EvictTenantRequest(tenant=tenant), await door.doors(mesh), door)
    members = [_plain(member) for member in answer.members]
    tiers = [tier for member in members for tier in member["tiers"]]
    return {
        "tenant": tenant,
        "blocks": sum(tier["blocks"] for tier in tiers),
        "bytes": sum(tier["bytes"] for tier in tiers),
        "in_use": sum(tier["in_use"] for tier in tiers),
        "members": members,
    }


async def _asked(
    request: gateway_pb2.EvictTenantRequest, gateways: Sequence[router_pb2.MeshWatcher], door: DoorAccess
) -> gateway_pb2.EvictTenantResponse:
    """The answer of the first gateway that can be reached. Raises PenstockError."""
    error: PenstockError | None = None
    for gateway in gateways:
        try:
            async with door.gateway_at(gateway) as stub:
                answer: gateway_pb2.EvictTenantResponse = await stub.EvictTenant(
                    request, timeout=_CALL_S, metadata=door.metadata(gateway)
                )
                return answer
        except (Unavailable, DeadlineExceeded) as fault:
            if isinstance(fault.__cause__, grpc.aio.AioRpcError) and is_raised(fault.__cause__):
                raise  # it has answered
            error = fault
    assert error is not None, "there is a gateway"
    raise error


def _plain(member: router_pb2.MemberEvicted) -> Json:
    return {
        "id": member.member_id,
        "address": member.address,
        "role": role_of(member),
        "answered": member.answered,
        "tiers": [
            {"tier": tier_name(one.tier), "blocks": one.blocks, "bytes": one.bytes, "in_use": one.in_use}
            for one in member.tiers
        ],
    }


def _show(found: Json) -> None:
    table = Table(box=None)
    for column in ("member", "role", "tier"):
        table.add_column(column, no_wrap=True)
    for column in ("blocks", "size", "in use"):
        table.add_column(column, justify="right")
    for member in found["members"]:
        who = (member["address"], member["role"])
        if not member["answered"]:
            table.add_row(*who, "[red]no answer[/]", "", "", "")
        for tier in member["tiers"]:
            table.add_row(*who, tier["tier"], str(tier["blocks"]), mib(tier["bytes"]), str(tier["in_use"]))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{counted(found['blocks'], 'block')} of {found['tenant']} are dropped, {found['in_use']} of them in use",
        markup=False,
    )
    if not all(member["answered"] for member in found["members"]):
        console.print("[red]not all members have answered[/]: see their logs, and run it again")
