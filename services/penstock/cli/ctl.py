"""`penstock ctl`: shows what a running mesh does, and tells its members what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from penstock.cli.adapters import app as adapters
from penstock.cli.asking import CALL_S, NOWHERE, AsJson, Mesh, MeshAccess, done, members, of_first
from penstock.cli.doctor import doctor
from penstock.cli.evicting import evict
from penstock.cli.explaining import explain
from penstock.cli.session_list import sessions
from penstock.cli.top import top
from penstock.rpc.shown.figures import role_of, state_of
from penstock.runtime.config import sources
from penstock.v1 import router_pb2, router_pb2_grpc

app = App(
    name="ctl",
    help="Shows what a running mesh does and why, drains its workers and changes their roles, and finds out what is"
    " wrong with it.",
    config=sources("ctl"),
)
app.command(adapters)
for command in (top, sessions, explain, evict, doctor):
    app.command(command)

Role = Literal["prefill", "decode", "both"]
_ROLES: dict[str, router_pb2.Role.ValueType] = {
    "prefill": router_pb2.ROLE_PREFILL,
    "decode": router_pb2.ROLE_DECODE,
    "both": router_pb2.ROLE_BOTH,
}
_LOOK_S = 0.5
"""Between two looks at a worker that drains."""


@app.command
def workers(*, mesh: Mesh = NOWHERE, as_json: AsJson = False) -> int:
    """Shows the workers and stores that have joined, and what they do.

    Parameters
    ----------
    as_json:
        Writes one JSON list instead of a table.
    """
    return _done(_workers(mesh), as_json)


@app.command
def drain(
    worker: str,
    *,
    mesh: Mesh = NOWHERE,
    force: bool = False,
    wait: bool = False,
    end: Annotated[bool, Parameter(name="--exit", negative=())] = False,
    as_json: AsJson = False,
) -> int:
    """Takes a worker out of rotation: what runs there goes on, nothing new comes. It stays, idle, until `undrain`.

    Parameters
    ----------
    worker:
        Its id or its address, as `penstock ctl workers` shows them.
    force:
        Also when no other worker decodes its model.
    wait:
        Returns when nothing runs there any more; with --exit, when it has left.
    end:
        Its process ends when nothing runs there any more, however long that takes. Whatever keeps it running, such as
        `penstock up`, starts it again.
    as_json:
        Writes one JSON object instead of a table.
    """
    command = router_pb2.MemberCommand(drain=True, exit=end)
    return _done(_command(mesh, worker, command, force=force, wait=wait), as_json)


@app.command
def undrain(worker: str, *, mesh: Mesh = NOWHERE, as_json: AsJson = False) -> int:
    """Brings a worker that drains back into rotation.

    Parameters
    ----------
    worker:
        Its id or its address.
    as_json:
        Writes one JSON object instead of a table.
    """
    return _done(_command(mesh, worker, router_pb2.MemberCommand(drain=False)), as_json)


@app.command(name="role")
def give_role(
    worker: str,
    role: Role,
    *,
    mesh: Mesh = NOWHERE,
    force: bool = False,
    as_json: AsJson = False,
) -> int:
    """Gives a worker another role: what runs there goes on, new work is of that kind.

    Parameters
    ----------
    worker:
        Its id or its address.
    role:
        prefill, decode, or both: it decodes, and computes the prompts of what it decodes.
    force:
        Also when no other worker decodes its model.
    as_json:
        Writes one JSON object instead of a table.
    """
    return _done(_command(mesh, worker, router_pb2.MemberCommand(role=_ROLES[role]), force=force), as_json)


async def _workers(mesh: MeshAccess) -> list[router_pb2.JoinedMember]:
    return list((await of_first(mesh, members)).members)


async def _command(
    mesh: MeshAccess,
    worker: str,
    command: router_pb2.MemberCommand,
    *,
    force: bool = False,
    wait: bool = False,
) -> router_pb2.JoinedMember:
    request = router_pb2.CommandRequest(member=worker, command=command, force=force)

    async def tell(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.JoinedMember:
        return (await stub.Command(request, timeout=CALL_S)).member

    told = await of_first(mesh, tell)
    while wait and (command.exit or told.running + told.waiting):
        await asyncio.sleep(_LOOK_S)
        there = [member for member in await _workers(mesh) if member.member_id == told.member_id]
        if not there:
            break
        told = there[0]
    return told


def _done(asking: Any, as_json: bool) -> int:
    """Prints what came of it. Returns the exit code."""

    def plain(found: Any) -> Any:
        return [_plain(member) for member in found] if isinstance(found, list) else _plain(found)

    return done(asking, lambda found: _show(found if isinstance(found, list) else [found]), plain, as_json=as_json)


def _plain(member: router_pb2.JoinedMember) -> dict[str, Any]:
    return {
        "id": member.member_id,
        "role": role_of(member),
        "state": state_of(member),
        "address": member.address,
        "host": member.host_id,
        "model": member.model_name,
        "running": member.running,
        "waiting": member.waiting,
        "queued_tokens": member.queued_prefill_tokens,
        "kv_usage": round(member.kv_usage, 4),
    }


def _show(members: Sequence[router_pb2.JoinedMember]) -> None:
    table = Table(box=None)
    for column in ("address", "role", "state", "model", "running", "waiting", "queued", "kv", "host", "id"):
        table.add_column(column, no_wrap=column in ("address", "id"))
    for member in members:
        plain = _plain(member)
        works = [str(plain[name]) for name in ("running", "waiting", "queued_tokens")]
        load = [*works, f"{member.kv_usage:.0%}"] if member.model_name else [""] * 4
        who = [plain[name] for name in ("address", "role", "state", "model")]
        table.add_row(*who, *load, member.host_id, member.member_id)
    Console().print(table)
