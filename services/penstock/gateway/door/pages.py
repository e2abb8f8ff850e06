"""The HTTP endpoints that do not generate text, and the responses to errors outside the generating endpoints."""

from __future__ import annotations

import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import Internal, InvalidRequest, NotFound, PenstockError
from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.accounts.auth import session_digest
from penstock.gateway.api.anthropic.shapes import message_error, model_json
from penstock.gateway.api.inquiry import Json, encode
from penstock.gateway.api.openai.asks import session_hint
from penstock.gateway.api.openai.shapes import error_json, openai_model
from penstock.gateway.api.openapi.document import document
from penstock.gateway.completing.completer import Completer
from penstock.gateway.completing.threads import THREAD_FROM
from penstock.gateway.door.operating import check_operator, past_request
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.reply import JSON
from penstock.gateway.door.uploads import Uploads
from penstock.runtime.metrics import CONTENT_TYPE

_HINT_BYTES = 4096
_ANYBODY = ""
"""Who shows no key waits for others that show none."""


class Pages:
    """The endpoints that do not generate text."""

    def __init__(self, reception: Reception, uploads: Uploads) -> None:
        self._reception = reception
        self._uploads = uploads

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        self._reception.auth.identify(request.headers)
        models, started = self._reception.models, self._reception.started
        if _anthropic(request):
            found = [model_json(model.name, started) for model in models.every()]
            return _json({"data": found, "first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False})
        return _json({"object": "list", "data": [_openai(model, started) for model in models.every()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        self._reception.auth.identify(request.headers)
        model, started = self._reception.models.of(request.path_params["name"]), self._reception.started
        return _json(model_json(model.name, started) if _anthropic(request) else _openai(model, started))

    async def past(self, request: Request) -> Response:
        """GET /v1/requests/{id}: what became of a request that has ended. A tenant sees its own, an operator all."""
        found = past_request(self._reception, request.path_params["id"], request.headers)
        return Response(found, media_type=JSON)

    async def hint(self, request: Request) -> Response:
        """POST /v1/sessions/hint"""
        tenant = self._reception.auth.tenant(request.headers)
        try:
            async with self._uploads.body(tenant, request.headers, request.receive, _HINT_BYTES) as body:
                hint = session_hint(body)
        except ClientGone:
            return Response(status_code=400)  # the client has left and reads no response
        session = session_digest(tenant, request.headers, hint.prompt_cache_key)
        if not session:
            raise InvalidRequest("x-session-affinity: this header must name the session", field="x-session-affinity")
        await self._reception.models.hint(session, hint.outlook(""))
        return _json({"object": "session.hint", "accepted": True})

    async def openapi(self, _request: Request) -> Response:
        """The OpenAPI document of all endpoints."""
        return Response(await self._reception.threads.run(document, THREAD_FROM, _ANYBODY), media_type=JSON)

    async def healthz(self, _request: Request) -> Response:
        """Answers while the process runs."""
        return Response(b"ok\n", media_type="text/plain")

    async def health(self, _request: Request) -> Response:
        """/readyz as other servers name and write it."""
        return _json({"status": "ok"} if self._ready else {"status": "loading model"}, 200 if self._ready else 503)

    async def readyz(self, _request: Request) -> Response:
        """Answers 200 when a request for one of the models would succeed, else 503."""
        ready = self._ready
        return Response(b"ready\n" if ready else b"not ready\n", 200 if ready else 503, media_type="text/plain")

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format, for operators: the figures are those of all tenants."""
        check_operator(self._reception, request.headers)
        return Response(self._reception.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @property
    def _ready(self) -> bool:
        return self._reception.view.ready and not self._reception.drain.closing


def _openai(model: Completer, started: int) -> Json:
    return openai_model(model.name, started, model.context, ready=model.ready, base=model.base)


def _json(value: Json, status: int = 200) -> Response:
    return Response(encode(value), status, media_type=JSON)


def _error(request: Request, error: PenstockError, status: int) -> Response:
    """The error in the words of the API that the client speaks."""
    id = request.state.request_id
    if not _anthropic(request):
        return _json(error_json(error), status)
    response = _json(message_error(error, id), status)
    response.headers["request-id"] = id
    return response


def _anthropic(request: Request) -> bool:
    return request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers


async def penstock_error(request: Request, error: Exception) -> Response:
    """Responds with the error's own status and message."""
    assert isinstance(error, PenstockError)
    response = _error(request, error, error.http_status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(math.ceil(error.retry_after))
    return response


async def http_error(request: Request, error: Exception) -> Response:
    """Responds to a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    found: PenstockError = NotFound(f"{request.method} {request.url.path[:100]} does not exist", code="not_found")
    if error.status_code != 404:
        found = InvalidRequest(error.detail)
    response = _error(request, found, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def internal_error(request: Request, _defect: Exception) -> Response:
    """Responds to a defect, without its details; starlette has logged them."""
    return _error(request, Internal("internal error"), 500)
