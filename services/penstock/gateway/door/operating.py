"""What an operator asks of a gateway: what became of a request, and that a tenant's blocks be dropped."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import Forbidden, InvalidRequest, NotFound
from penstock.gateway.accounts.auth import DEFAULT_TENANT
from penstock.gateway.door.reception import Reception
from penstock.kv.identity import NAMESPACE_BYTES, root_key
from penstock.rpc.bounds import check_name
from penstock.v1 import router_pb2

_SHOWN = 100


def past_request(reception: Reception, id: str, headers: Mapping[str, str]) -> bytes:
    """What became of a request that has ended, as JSON; a tenant sees its own, an operator all. Raises NotFound."""
    who = reception.auth.identify(headers)
    tenant = None if who.operator else who.tenant
    found = reception.past.find(id, tenant) or reception.refusals.past.find(id, tenant)
    if found is None:
        what = f"the request {id[:_SHOWN]!r} is not known here: the gateway tells of {reception.past.bounds}"
        if tenant is None:
            what += f"; {reception.past.kept()}"
        raise NotFound(what, field="id", code="request_not_found")
    return found


def check_operator(reception: Reception, headers: Mapping[str, str]) -> None:
    """Raises Unauthenticated, and Forbidden unless the caller may do what an operator may."""
    if not reception.auth.identify(headers).operator:
        right = "an operator's key may do that: `penstock keys add NAME --operator` makes one"
        raise Forbidden(right, code="forbidden")


async def evict_tenant(reception: Reception, tenant: str, headers: Mapping[str, str]) -> list[router_pb2.MemberEvicted]:
    """Has all members drop the tenant's blocks. Raises Forbidden, InvalidRequest, Unavailable."""
    check_operator(reception, headers)
    check_name("tenant", tenant, least=1)
    auth = reception.auth
    if auth.ring is None and tenant != DEFAULT_TENANT:
        right = f"must be {DEFAULT_TENANT!r}: without api_keys there is only that tenant"
        raise InvalidRequest(f"tenant = {tenant[:_SHOWN]!r}: {right}", field="tenant")
    namespace = auth.namespace(tenant)
    known = [found for model in reception.models if (found := reception.view.known(model.name)) is not None]
    roots = [root_key(found.spec, namespace) for found in known]
    request = router_pb2.EvictRequest(namespace=namespace[:NAMESPACE_BYTES], roots=roots)
    return await reception.sites.evict(request)
