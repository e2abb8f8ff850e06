"""`penstock ctl sessions`: the sessions that the routers remember."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.asking import CALL_S, AsJson, Routers, done, members, of_all, of_first
from penstock.v1 import router_pb2, router_pb2_grpc

Json = dict[str, Any]


def sessions(*, router: Routers, most: int = 100, tenant: str = "", as_json: AsJson = False) -> int:
    """Shows the sessions that had a request last, where they are and what of them is cached now. A session is shown by
    its digest: the mesh does not know the name that its client gave it.

    Parameters
    ----------
    router:
        Address of a router, host:port; of several, with commas between them, all are asked.
    most:
        Shows that many, the latest ones; 1 to 1000.
    tenant:
        Only those of this tenant.
    as_json:
        Writes one JSON object instead of a table.
    """
    return done(_sessions(router, most, tenant), _show, lambda found: found, as_json=as_json)


async def _sessions(routers: Sequence[str], most: int, tenant: str) -> Json:
    request = router_pb2.SessionsRequest(most=max(0, most), tenant=tenant)

    async def ask(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.SessionsResponse:
        return await stub.Sessions(request, timeout=CALL_S)

    answers = await of_all(routers, ask)
    there = {one.member_id: one.address for one in (await of_first(routers, members)).members}
    latest: dict[tuple[str, str], router_pb2.KnownSession] = {}
    for answer in answers:
        for one in answer.sessions:
            known = latest.get((one.model_name, one.session))
            # A router that has planned its last request knows more than one that was told of it.
            if known is None or (not one.tenant, one.age_s) < (not known.tenant, known.age_s):
                latest[one.model_name, one.session] = one
    shown = sorted(latest.values(), key=lambda one: one.age_s)[: most or None]
    return {
        "known": max(answer.known for answer in answers),
        "sessions": [_plain(one, there) for one in shown],
    }


def _plain(one: router_pb2.KnownSession, there: dict[str, str]) -> Json:
    return {
        "session": one.session,
        "tenant": one.tenant,
        "model": one.model_name,
        "prefill": there.get(one.prefill, one.prefill),
        "decode": there.get(one.decode, one.decode),
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "answer_tokens": one.answer_tokens,
        "requests": one.requests,
        "age_s": round(one.age_s, 3),
    }


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
