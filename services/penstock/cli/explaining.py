"""`penstock ctl explain`: why a request went where it went, and where its time went."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.cli.asking import (
    CALL_S,
    NOWHERE,
    AsJson,
    Door,
    DoorAccess,
    Mesh,
    MeshAccess,
    done,
    members,
    of_all,
    of_first,
)
from penstock.cli.explanation import show
from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.rpc.shown.figures import Json
from penstock.rpc.shown.plans import plan_names, plans_of
from penstock.rpc.shown.sessions import addresses
from penstock.v1 import gateway_pb2, router_pb2, router_pb2_grpc


def explain(request_id: str, *, mesh: Mesh = NOWHERE, door: Door = None, as_json: AsJson = False) -> int:
    """Explains a request that has ended: which plans there were to choose from, what was fetched from where, for what
    it waited, and where it moved when a worker failed.

    Parameters
    ----------
    request_id:
        The x-request-id of its response, or the response's own id.
    as_json:
        Writes one JSON object.
    """
    return done(_explain(request_id, mesh, door or DoorAccess()), show, lambda found: found, as_json=as_json)


async def _explain(request_id: str, mesh: MeshAccess, door: DoorAccess) -> Json:
    record = await _record(request_id, await door.doors(mesh), door)
    found: Json = {"request": record, "plans": {}, "members": {}}
    if mesh.router:
        found["members"] = addresses(await of_first(mesh, members))
        found["plans"] = await _plans(mesh, record)
    return found


async def _record(request_id: str, doors: Sequence[router_pb2.MeshWatcher], door: DoorAccess) -> Json:
    """What the first gateway says that knows the request. Raises PenstockError."""
    query, fault = gateway_pb2.PastRequestQuery(id=request_id), PenstockError("no gateway was asked")
    for one in doors:
        try:
            async with door.gateway_at(one) as stub:
                said = await stub.PastRequest(query, timeout=CALL_S, metadata=door.metadata(one))
            record: Json = json.loads(said.json)
            return record
        except (NotFound, Unavailable) as error:
            if not isinstance(fault, NotFound):
                fault = error
    raise fault


async def _plans(mesh: MeshAccess, record: Json) -> Json:
    """What the routers weighed, by the names of the request's plans."""
    names = plan_names(record)
    if not names:
        return {}

    async def ask(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.PlansResponse:
        return await stub.Plans(router_pb2.PlansRequest(plans=names), timeout=CALL_S)

    return plans_of(await of_all(mesh, ask))
