"""`penstock ctl doctor`: finds out what is wrong with a mesh, or with the host on which it is to run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from penstock.cli.asking import NOWHERE, AsJson, Door, DoorAccess, Mesh, MeshAccess, done
from penstock.cli.checks import Check, CheckedService, checked_clocks, checked_host, checked_versions
from penstock.cli.frames import counted
from penstock.cli.visits import visited_draft, visited_gateway, visited_member, visited_router, visited_service
from penstock.rpc.channels import Channels
from penstock.runtime.config import Addresses
from penstock.v1 import router_pb2

_AT_ONCE = 32
"""Members that are examined at a time."""


def doctor(
    *,
    mesh: Mesh = NOWHERE,
    also: Addresses = (),
    door: Door = None,
    as_json: AsJson = False,
) -> int:
    """Checks addresses, credentials, versions, clocks, shared memory, disks, limits and kernels, and says what to do
    about what is wrong. Without --router only this host is looked at, as before a first start. The exit status is 1
    when there is a problem.

    Parameters
    ----------
    also:
        Addresses of further services: those that have joined no router.
    as_json:
        Writes one JSON object instead of lines.
    """
    return done(
        _examined(mesh, also, door or DoorAccess()),
        _show,
        lambda checks: {"ok": all(one.ok for one in checks), "checks": [one.plain() for one in checks]},
        as_json=as_json,
        code=lambda checks: int(not all(one.ok for one in checks)),
    )


async def _examined(mesh: MeshAccess, also: Sequence[str], door: DoorAccess) -> list[Check]:
    checks = await checked_host(kernels=not mesh.router)
    async with mesh.channels() as channels:
        return checks + await _visited(mesh.router, also, door, channels)


async def _visited(routers: Sequence[str], also: Sequence[str], door: DoorAccess, channels: Channels) -> list[Check]:
    checks: list[Check] = []
    gate = asyncio.Semaphore(_AT_ONCE)

    async def within(visiting: Any) -> CheckedService:
        async with gate:
            visit: CheckedService = await visiting
            return visit

    async def all_of(visiting: Sequence[Any]) -> list[CheckedService]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(within(one)) for one in visiting]
        return [task.result() for task in running]

    visits = await all_of([visited_router(address, channels) for address in routers])
    known = [visit.found for visit in visits if visit.found is not None]
    members = {one.address: one for found in known for one in found.members}
    drafts = {one.address: one for found in known for one in found.drafts}
    gateways = {one.address: one for found in known for one in found.gateways}
    gateways |= {address: router_pb2.MeshWatcher(address=address) for address in door.gateway}
    visits += await all_of(
        [
            *(visited_member(member, channels) for member in members.values()),
            *(visited_draft(draft.address, channels) for draft in drafts.values()),
            *(visited_service(address, channels) for address in also if address not in drafts),
            *(visited_gateway(gateway, door) for gateway in gateways.values()),
        ]
    )
    if known:
        checks += _complete(list(members.values()), len(gateways))
    checks += [check for visit in visits for check in visit.checks]
    return [*checks, *checked_versions(visits), *checked_clocks(visits)]


def _complete(members: Sequence[router_pb2.JoinedMember], gateways: int) -> list[Check]:
    """Whether somebody does each of the mesh's jobs."""
    decode = (router_pb2.ROLE_DECODE, router_pb2.ROLE_BOTH)
    models = sorted({one.model_name for one in members if one.model_name})
    checks = []
    for model in models:
        able = [
            one
            for one in members
            if one.model_name == model and one.role in decode and not (one.draining or one.silent)
        ]
        right = "start a decode worker of it, `penstock ctl undrain` one, or give one the role decode or both"
        found = f"{counted(len(able), 'worker')} for the answers of {model}"
        checks.append(Check("mesh", "workers", bool(able), found, "" if able else right))
    if not models:
        right = "start workers with --router set to these routers, or look into their logs for why they don't join"
        checks.append(Check("mesh", "workers", False, "no worker has joined", right))
    stores = sum(one.role == router_pb2.ROLE_KVSTORE for one in members)
    right = "start a kvstore with --router: without one there is no cache, and no prefill apart from decode"
    checks.append(Check("mesh", "stores", stores > 0, f"{stores} have joined", "" if stores else right))
    right = "start a gateway with --router set to these routers"
    checks.append(Check("mesh", "gateways", gateways > 0, f"{gateways} are known", "" if gateways else right))
    return checks


def _show(checks: Sequence[Check]) -> None:
    console = Console(highlight=False)
    for one in checks:
        mark = "[green]ok     [/]" if one.ok else "[red]problem[/]"
        console.print(f"{mark} {escape(one.where)}: {escape(one.check)}: {escape(one.found)}", soft_wrap=True)
        if one.advice and not one.ok:
            console.print(f"        {escape(one.advice)}", soft_wrap=True)
    problems = sum(not one.ok for one in checks)
    console.print(f"{counted(problems, 'problem')} in {counted(len(checks), 'check')}")
