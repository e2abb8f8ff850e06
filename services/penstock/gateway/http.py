"""The HTTP door: OpenAI's endpoints, health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound, PenstockError, TooLarge
from penstock.gateway.admission import Admission, ClientGone
from penstock.gateway.ask import Ask
from penstock.gateway.auth import session_digest
from penstock.gateway.completion import Caller, Completer, Completion
from penstock.gateway.delta import Delta, fold
from penstock.gateway.openai import chat_ask, completion_ask, session_hint
from penstock.gateway.shapes import ChatShape, CompletionShape, Json, encode, error_json, models_json
from penstock.rpc.context import read_trace, safe_request_id
from penstock.runtime.context import request_scope
from penstock.runtime.metrics import CONTENT_TYPE

_JSON = "application/json"
_THREAD_BODY = 256 * 1024
"""Bytes from which a body is parsed in a thread."""
_HINT_BYTES = 4096
_BODY_S = 30.0
"""A body that takes longer to arrive is not waited for: it holds one of the places."""

Shape = ChatShape | CompletionShape


def application(completer: Completer, admission: Admission, started: int) -> Starlette:
    """The ASGI application."""
    pages = Pages(completer, started)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", Generate(completer, admission, chat_ask, ChatShape), methods=["POST"]),
            Route("/v1/completions", Generate(completer, admission, completion_ask, CompletionShape), methods=["POST"]),
            Route("/v1/sessions/hint", pages.hint, methods=["POST"]),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
            Route("/healthz", pages.healthz, methods=["GET"]),
            Route("/readyz", pages.readyz, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error, PenstockError: _penstock_error, Exception: _internal_error},
    )


class Pages:
    """Everything that generates nothing."""

    def __init__(self, completer: Completer, started: int) -> None:
        self._completer = completer
        self._started = started

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        self._completer.auth.tenant(request.headers.get("authorization"))
        return _json(self._list())

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        self._completer.auth.tenant(request.headers.get("authorization"))
        self._completer.check_model(request.path_params["name"])
        return _json(self._list()["data"][0])

    async def hint(self, request: Request) -> Response:
        """POST /v1/sessions/hint"""
        tenant = self._completer.auth.tenant(request.headers.get("authorization"))
        try:
            body = await read_body(request.headers, request.receive, _HINT_BYTES, _BODY_S)
        except ClientGone:
            return Response(status_code=400)  # nobody reads it
        hint = session_hint(body)
        session = session_digest(tenant, request.headers, hint.prompt_cache_key)
        if not session:
            raise InvalidRequest("name the session in the header x-session-affinity", field="x-session-affinity")
        await self._completer.hint(session, hint.outlook(""))
        return _json({"object": "session.hint", "accepted": True})

    async def healthz(self, _request: Request) -> Response:
        """The process lives."""
        return Response(b"ok\n", media_type="text/plain")

    async def readyz(self, _request: Request) -> Response:
        """A request would succeed."""
        ready = self._completer.mesh.ready
        return Response(b"ready\n" if ready else b"not ready\n", 200 if ready else 503, media_type="text/plain")

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self._completer.metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _list(self) -> Json:
        known = self._completer.mesh.known
        return models_json(self._completer.config.served_name, self._started, known.max_model_len if known else None)


class Generate:
    """One generating endpoint, as a raw ASGI application: it watches for the client's leaving while it works."""

    def __init__(
        self, completer: Completer, admission: Admission, read: Callable[[bytes, int], Ask], shape: type[Shape]
    ) -> None:
        self._completer = completer
        self._admission = admission
        self._read = read
        self._shape = shape
        self._tracer = trace.get_tracer("penstock")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, in its own request scope and span."""
        headers = Headers(scope=scope)
        request_id = safe_request_id(headers.get("x-request-id")) or f"req-{secrets.token_hex(12)}"
        reply = _Reply(send, request_id)
        with request_scope(request_id):
            with self._tracer.start_as_current_span(
                f"POST {scope['path']}", read_trace(headers.items()), SpanKind.SERVER, record_exception=False
            ):
                await self._handle(headers, request_id, receive, reply)

    async def _handle(self, headers: Headers, request_id: str, receive: Receive, reply: _Reply) -> None:
        try:
            with self._admission.one():
                await self._admitted(headers, request_id, receive, reply)
        except ClientGone:
            pass
        except PenstockError as error:
            trace.get_current_span().set_status(StatusCode.ERROR, error.message)
            await reply.error(error)
        except Exception:
            structlog.get_logger("penstock.gateway").exception("request failed")
            await reply.error(Internal("internal error"))

    async def _admitted(self, headers: Headers, request_id: str, receive: Receive, reply: _Reply) -> None:
        began = time.perf_counter()
        tenant = self._completer.auth.tenant(headers.get("authorization"))
        config = self._completer.config
        body = await read_body(headers, receive, config.max_body_bytes, _BODY_S)
        size = len(body) if len(body) >= _THREAD_BODY else 0
        ask = await self._completer.in_thread(lambda: self._read(body, config.max_n), size)
        session = session_digest(tenant, headers, ask.cache_key)
        caller = Caller(tenant, session, request_id, began)
        await _until_gone(receive, reply, self._answer(ask, caller, reply))

    async def _answer(self, ask: Ask, caller: Caller, reply: _Reply) -> None:
        async with self._completer.open(ask, caller) as completion:
            shape = self._shape(
                completion.id,
                completion.created,
                ask.model,
                ask.sampling.logprobs is not None,
                ask.include_usage,
                ask.return_token_ids,
            )
            if ask.stream:
                await self._stream(completion, shape, reply)
            else:
                await self._whole(completion, shape, reply)

    async def _whole(self, completion: Completion, shape: Shape, reply: _Reply) -> None:
        choices: dict[int, Delta] = {}
        while deltas := await completion.outbox.next():
            fold(choices, deltas)
        await reply.json(shape.whole([choices[number] for number in sorted(choices)], completion.usage()))

    async def _stream(self, completion: Completion, shape: Shape, reply: _Reply) -> None:
        ping = self._completer.config.ping_s
        while True:
            try:
                async with asyncio.timeout(ping):
                    deltas = await completion.outbox.next()
            except TimeoutError:
                await reply.ping()
                continue
            if not deltas:
                break
            await reply.events([chunk for delta in deltas for chunk in shape.chunks(delta)])
        if completion.ask.include_usage:
            await reply.events([shape.last(completion.usage())])
        await reply.end_events()


class _Reply:
    """The response's side of one exchange. An error before the first byte is a status, after it an event."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._begun = False
        self.ended = False

    async def json(self, value: Json, status: int = 200, retry_after: float | None = None) -> None:
        """A whole response."""
        body = encode(value)
        headers = [(b"content-length", str(len(body)).encode())]
        if retry_after is not None:
            headers.append((b"retry-after", str(math.ceil(retry_after)).encode()))
        await self._begin(status, _JSON, headers)
        await self._send({"type": "http.response.body", "body": body})
        self.ended = True

    async def events(self, values: Sequence[Json]) -> None:
        """Server-sent events."""
        await self._write(b"".join(b"data: " + encode(value) + b"\n\n" for value in values))

    async def ping(self) -> None:
        """A comment, which clients skip."""
        await self._write(b": ping\n\n")

    async def end_events(self) -> None:
        """The last event."""
        await self._write(b"data: [DONE]\n\n", more=False)
        self.ended = True

    async def error(self, error: PenstockError) -> None:
        """What went wrong, in whatever way is still possible."""
        if self.ended:
            return
        with suppress(OSError):
            if not self._begun:
                await self.json(error_json(error), error.http_status, error.retry_after)
                return
            await self._write(b"data: " + encode(error_json(error)) + b"\n\n", more=False)
        self.ended = True

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self._begun:
            await self._begin(200, "text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _begin(self, status: int, kind: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        own = [(b"content-type", kind.encode()), (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": own + headers})


async def read_body(headers: Headers, receive: Receive, most: int, timeout_s: float) -> bytes:
    """The request's body. Raises TooLarge as soon as it is clear, at best before any of it was read."""
    too_large = TooLarge(f"the body is longer than {most} bytes", code="body_too_large")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    more = True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message: Message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > most:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError:
        raise DeadlineExceeded("the body took too long", code="timeout") from None
    return b"".join(pieces)


async def _until_gone(receive: Receive, reply: _Reply, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; when the client leaves before it has its reply, ends it and raises ClientGone."""
    working = asyncio.create_task(work)  # both end with this function
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not reply.ended:
            raise ClientGone
        await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Json, status: int = 200) -> Response:
    return Response(encode(value), status, media_type=_JSON)


async def _penstock_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return _json(error_json(error), error.http_status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found: PenstockError = NotFound(f"there is no {request.method} {request.url.path[:100]}", code="not_found")
    if error.status_code != 404:
        found = InvalidRequest(error.detail)
    response = _json(error_json(found), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(_request: Request, _error: Exception) -> Response:
    return _json(error_json(Internal("internal error")), 500)
