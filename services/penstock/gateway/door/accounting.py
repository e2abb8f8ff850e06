"""GET /v1/usage: what tenants have used. A tenant sees its own account, an operator all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import Forbidden, InvalidRequest
from penstock.gateway.accounts.entry import HOUR_S
from penstock.gateway.accounts.report import PERIODS, as_csv, instant, rows
from penstock.gateway.api.inquiry import Json, encode
from penstock.gateway.completing.threads import THREAD_FROM
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.reply import JSON

_KNOWN = ("from", "to", "by", "tenant", "format")
_DAYS = 30
_FEW = 64
"""Entries that are written as quickly as a thread is asked."""


class Accounting:
    """The endpoint."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def usage(self, request: Request) -> Response:
        """GET /v1/usage?from=...&to=...&by=hour|day|total&tenant=...&format=json|csv; the last 30 days without from."""
        who = self._reception.auth.identify(request.headers)
        asked = request.query_params
        if unknown := [name for name in asked if name not in _KNOWN]:
            raise InvalidRequest(f"{unknown[0]}: is not known; {', '.join(_KNOWN)} are", field=unknown[0])
        period, form = asked.get("by", "day"), asked.get("format", "json")
        for field, value, right in (("by", period, tuple(PERIODS)), ("format", form, ("json", "csv"))):
            if value not in right:
                raise InvalidRequest(f"{field}: must be one of {', '.join(right)}, not {value[:40]!r}", field=field)
        tenant = asked.get("tenant")
        if not who.operator:
            if tenant not in (None, who.tenant):
                raise Forbidden("tenant: only an operator's key sees the account of another", field="tenant")
            tenant = who.tenant
        now = int(time.time())
        until = instant("to", asked["to"]) if "to" in asked else now + HOUR_S
        since = instant("from", asked["from"]) if "from" in asked else max(0, until - _DAYS * 24 * HOUR_S)
        since -= since % HOUR_S
        if since >= until:
            raise InvalidRequest("from: must be before to", field="from")
        ledger = self._reception.ledger
        entries, currency = await ledger.read(since, until, tenant), ledger.terms.currency
        head = {"object": "list", "currency": currency, "from": since, "to": until, "by": period}

        def written() -> bytes:
            found = rows(entries, period)
            return as_csv(found, currency).encode() if form == "csv" else _listed(head, found)

        body = await self._reception.threads.run(written, THREAD_FROM if len(entries) > _FEW else 0, who.tenant)
        return Response(body, media_type="text/csv; charset=utf-8" if form == "csv" else JSON)


def _listed(head: Json, found: Sequence[Json]) -> bytes:
    """The rows one by one: nobody else runs while one value is encoded."""
    return encode(head)[:-1] + b',"data":[' + b",".join(map(encode, found)) + b"]}"
