"""`penstock ctl sessions`: the sessions that the routers remember."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.asking import CALL_S, NOWHERE, AsJson, Mesh, MeshAccess, done, members, of_all, of_first
from penstock.rpc.shown.figures import Json
from penstock.rpc.shown.sessions import addresses, sessions_of
from penstock.v1 import router_pb2, router_pb2_grpc


def sessions(*, mesh: Mesh = NOWHERE, most: int = 100, tenant: str = "", as_json: AsJson = False) -> int:
    """Shows the sessions that had a request last, where they are and what of them is cached now. A session is shown by
    its digest: the mesh does not know the name that its client gave it.

    Parameters
    ----------
    most:
        Shows that many, the latest ones; 1 to 1000.
    tenant:
        Only those of this tenant.
    as_json:
        Writes one JSON object instead of a table.
    """
    return done(_sessions(mesh, most, tenant), _show, lambda found: found, as_json=as_json)


async def _sessions(mesh: MeshAccess, most: int, tenant: str) -> Json:
    request = router_pb2.SessionsRequest(most=max(0, most), tenant=tenant)

    async def ask(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.SessionsResponse:
        return await stub.Sessions(request, timeout=CALL_S)

    answers = await of_all(mesh, ask)
    return sessions_of(answers, addresses(await of_first(mesh, members)), most)


def _show(found: Json) -> None:
    table = Table(box=None)
    columns = ("session", "tenant", "model", "prefill", "decode", "prompt", "cached", "answer", "requests", "age")
    for column in columns:
        table.add_column(column, no_wrap=column == "session")
    for one in found["sessions"]:
        names = [escape(one[name]) for name in ("session", "tenant", "model", "prefill", "decode")]
        counts = [str(one[f"{name}_tokens"]) for name in ("prompt", "cached", "answer")]
        table.add_row(*names, *counts, str(one["requests"]), f"{one['age_s']:.0f} s")
    console = Console()
    console.print(table)
    console.print(f"{len(found['sessions'])} of {found['known']} that are remembered", highlight=False)
