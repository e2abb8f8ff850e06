"""The HTTP endpoints for stored responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.gateway.api.inquiry import encode
from penstock.gateway.api.responses.api import StoredResponses, page_of
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.reply import JSON


class ResponsePages:
    """What a client may do with the stored responses of its tenant."""

    def __init__(self, reception: Reception) -> None:
        self._auth = reception.auth
        self._threads = reception.threads
        self._stored = StoredResponses(reception.responses)

    async def one(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/{id}"""
        tenant, id = self._auth.tenant(request.headers), request.path_params["id"]
        if request.method == "DELETE":
            return Response(encode(await self._stored.delete(tenant, id)), media_type=JSON)
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("stream: a stored response is given whole", field="stream")
        return Response((await self._stored.find(tenant, id)).response, media_type=JSON)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items"""
        tenant = self._auth.tenant(request.headers)
        kept = await self._stored.find(tenant, request.path_params["id"])
        page = await self._threads.run(lambda: encode(page_of(kept, request.query_params)), len(kept.items), tenant)
        return Response(page, media_type=JSON)
