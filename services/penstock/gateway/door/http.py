"""The HTTP door: OpenAI's endpoints, health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.errors import Internal, PenstockError
from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.accounts.auth import session_digest
from penstock.gateway.api.openai.asks import chat_ask, completion_ask
from penstock.gateway.api.openai.shapes import ChatShape, CompletionShape
from penstock.gateway.completing.completion import Caller, Completion
from penstock.gateway.completing.delta import Delta, fold
from penstock.gateway.door.pages import Pages, http_error, internal_error, penstock_error
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.reply import Reply
from penstock.gateway.door.uploads import Uploads
from penstock.gateway.request.ask import Ask
from penstock.rpc.context import read_trace, safe_request_id
from penstock.runtime.context import request_scope
from penstock.runtime.tasks import first_of

_THREAD_BODY = 64 * 1024
"""Bytes from which a body is decoded in a thread."""

Shape = ChatShape | CompletionShape


def application(reception: Reception) -> Starlette:
    """The ASGI application."""
    uploads = Uploads(reception.config.max_upload_bytes)
    pages = Pages(reception, uploads)
    chat = Generate(reception, uploads, read=chat_ask, shape=ChatShape)
    text = Generate(reception, uploads, read=completion_ask, shape=CompletionShape)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/sessions/hint", pages.hint, methods=["POST"]),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
            Route("/healthz", pages.healthz, methods=["GET"]),
            Route("/readyz", pages.readyz, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
        ],
        exception_handlers={HTTPException: http_error, PenstockError: penstock_error, Exception: internal_error},
    )


class Generate:
    """One generating endpoint, as a raw ASGI application: it watches for the client's leaving while it works."""

    def __init__(
        self,
        reception: Reception,
        uploads: Uploads,
        *,
        read: Callable[[bytes, int], Ask],
        shape: type[Shape],
    ) -> None:
        """`read` makes an ask of a body and the most choices that a request may have."""
        self._reception = reception
        self._uploads = uploads
        self._read = read
        self._shape = shape
        self._tracer = trace.get_tracer("penstock")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, in its own request scope and span."""
        headers = Headers(scope=scope)
        request_id = safe_request_id(headers.get("x-request-id")) or f"req-{secrets.token_hex(12)}"
        reply = Reply(send, request_id)
        with request_scope(request_id):
            with self._tracer.start_as_current_span(
                f"POST {scope['path']}", read_trace(headers.items()), SpanKind.SERVER, record_exception=False
            ):
                await self._handle(headers, request_id, receive, reply)

    async def _handle(self, headers: Headers, request_id: str, receive: Receive, reply: Reply) -> None:
        try:
            with self._reception.admission.one():
                await self._admitted(headers, request_id, receive, reply)
        except ClientGone:
            pass
        except PenstockError as error:
            trace.get_current_span().set_status(StatusCode.ERROR, error.message)
            await reply.error(error)
        except Exception:
            structlog.get_logger("penstock.gateway").exception("request failed")
            await reply.error(Internal("internal error"))

    async def _admitted(self, headers: Headers, request_id: str, receive: Receive, reply: Reply) -> None:
        began = time.perf_counter()
        tenant = self._reception.auth.tenant(headers.get("authorization"))
        ask = await self._ask(headers, receive)
        session = session_digest(tenant, headers, ask.cache_key)
        caller = Caller(tenant, session, request_id, began)
        await _until_gone(receive, reply, self._answer(ask, caller, reply))

    async def _ask(self, headers: Headers, receive: Receive) -> Ask:
        config = self._reception.config
        async with self._uploads.body(headers, receive, config.max_body_bytes) as body:
            size = len(body) if len(body) >= _THREAD_BODY else 0
            return await self._reception.threads.run(lambda: self._read(body, config.max_n), size)

    async def _answer(self, ask: Ask, caller: Caller, reply: Reply) -> None:
        async with self._reception.completer.open(ask, caller) as completion:
            shape = self._shape(
                completion.id,
                completion.created,
                ask.model,
                logprobs=ask.sampling.logprobs is not None,
                include_usage=ask.include_usage,
                token_ids=ask.return_token_ids,
            )
            if ask.stream:
                await self._stream(completion, shape, reply)
            else:
                await self._whole(completion, shape, reply)

    async def _whole(self, completion: Completion, shape: Shape, reply: Reply) -> None:
        choices: dict[int, Delta] = {}
        while deltas := await completion.outbox.next():
            fold(choices, deltas)
        await reply.json(shape.whole([choices[number] for number in sorted(choices)], completion.usage()))

    async def _stream(self, completion: Completion, shape: Shape, reply: Reply) -> None:
        ping = self._reception.config.ping_s
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


async def _until_gone(receive: Receive, reply: Reply, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; when the client leaves before it has its reply, ends it and raises ClientGone."""
    gone, _ = await first_of(_gone(receive, reply), work)
    if gone:
        raise ClientGone


async def _gone(receive: Receive, reply: Reply) -> bool:
    """Returns True when the client has left; never returns after the reply's last byte, when leaving is normal."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if reply.ended:
        await asyncio.get_running_loop().create_future()
    return True
