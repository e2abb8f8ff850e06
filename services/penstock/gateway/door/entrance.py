"""What all HTTP requests pass before their route: an id, the origin of the page that sends them, one form of path."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import Forbidden, PenstockError
from penstock.gateway.api.inquiry import encode
from penstock.gateway.api.openai.shapes import error_json
from penstock.gateway.door.origins import Header, Origins
from penstock.gateway.door.reply import JSON
from penstock.rpc.context import safe_request_id


class Entrance:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes one request on, with its id in scope["state"], or answers it."""
        headers = Headers(scope=scope)
        request_id = safe_request_id(headers.get("x-request-id")) or f"req-{secrets.token_hex(12)}"
        scope["state"] = {"request_id": request_id}
        scope["path"] = scope["path"].rstrip("/") or "/"
        origin, method = headers.get("origin", ""), scope["method"]
        common: list[Header] = self._origins.headers(origin) if origin else []

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(raw=message.setdefault("headers", []))
                found.setdefault("x-request-id", request_id)
                message["headers"] += common
            await send(message)

        if method == "OPTIONS":
            wanted = headers.get("access-control-request-headers", "")
            await _send(send, 204, [*self._origins.preflight(origin, wanted), (b"x-request-id", request_id.encode())])
        elif origin and self._origins.refuses(origin, headers.get("host", ""), method):
            what = "origin: web pages of this origin may not use the gateway; --cors-origins can name it"
            await _refuse(named, Forbidden(what, field="origin", code="foreign_origin"))
        else:
            await self._app(scope, receive, named)


async def _refuse(send: Send, error: PenstockError) -> None:
    body = encode(error_json(error))
    await _send(send, error.http_status, [(b"content-type", JSON.encode())], body)


async def _send(send: Send, status: int, headers: list[Header], body: bytes = b"") -> None:
    if status != 204:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
