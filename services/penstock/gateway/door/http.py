"""The HTTP door: OpenAI's endpoints, health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.errors import Internal, InvalidRequest, PenstockError, RateLimited, forget_way
from penstock.gateway.accounts.admission import ClientGone
from penstock.gateway.accounts.auth import session_digest
from penstock.gateway.accounts.pot import TenantPot
from penstock.gateway.api.inquiry import Api, Inquiry, Shape
from penstock.gateway.completing.completion import Caller, Completion
from penstock.gateway.completing.explaining import explanation, wants_plan
from penstock.gateway.completing.repeating import LAST_EVENT
from penstock.gateway.completing.timing import BEFORE_FIRST, PARTS, server_timing
from penstock.gateway.door.accounting import Accounting
from penstock.gateway.door.answering import generating, inquiry_of, whole_of
from penstock.gateway.door.console import console_routes
from penstock.gateway.door.counting import Counting
from penstock.gateway.door.deadline import patience_s
from penstock.gateway.door.entrance import Entrance
from penstock.gateway.door.filing import FilingPages
from penstock.gateway.door.heartbeat import heartbeat
from penstock.gateway.door.origins import Origins
from penstock.gateway.door.pages import Pages, http_error, internal_error, penstock_error
from penstock.gateway.door.protocol import streamed_body
from penstock.gateway.door.reception import Reception
from penstock.gateway.door.refusals import Arrival
from penstock.gateway.door.repeats import repeat_key
from penstock.gateway.door.reply import Reply
from penstock.gateway.door.stored import ResponsePages
from penstock.gateway.door.telling import telling
from penstock.gateway.door.uploads import Uploads
from penstock.rpc.context import read_trace
from penstock.runtime.context import request_scope
from penstock.runtime.tasks import first_of


def application(reception: Reception) -> Entrance:
    """The ASGI application."""
    handlers = {HTTPException: http_error, PenstockError: penstock_error, Exception: internal_error}
    app = Starlette(routes=[*routes(reception), *console_routes(reception)], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Entrance(app, Origins(reception.config.cors_origins, keyless=reception.config.api_keys is None))


def routes(reception: Reception) -> list[Route]:
    """Every endpoint but those of the console; the OpenAPI document names them too."""
    several, weight = reception.auth.ring is not None, reception.limiter.weight
    uploads = Uploads(TenantPot(reception.config.max_upload_bytes, several=several, weight=weight))
    pages = Pages(reception, uploads)
    stored = ResponsePages(reception)
    counting = Counting(reception, uploads)
    filing = FilingPages(reception, uploads)
    generate = generating(reception).items()
    return [
        *(Route(path, Generate(reception, uploads, api), methods=["POST"]) for path, api in generate),
        Route("/v1/responses/input_tokens", counting.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", stored.one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", stored.input_items, methods=["GET"]),
        Route("/v1/messages/count_tokens", counting.count, methods=["POST"]),
        Route("/v1/embeddings", counting.embeddings, methods=["POST"]),
        Route("/v1/files", filing.files, methods=["GET", "POST"]),
        Route("/v1/files/{id}", filing.file, methods=["GET", "DELETE"]),
        Route("/v1/files/{id}/content", filing.content, methods=["GET"]),
        Route("/v1/batches", filing.batches, methods=["GET", "POST"]),
        Route("/v1/batches/{id}", filing.batch, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", filing.cancel, methods=["POST"]),
        Route("/tokenize", counting.tokenize, methods=["POST"]),
        Route("/detokenize", counting.detokenize, methods=["POST"]),
        Route("/v1/sessions/hint", pages.hint, methods=["POST"]),
        Route("/v1/models", pages.models, methods=["GET"]),
        Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
        Route("/v1/requests/{id}", pages.past, methods=["GET"]),
        Route("/v1/usage", Accounting(reception).usage, methods=["GET"]),
        Route("/openapi.json", pages.openapi, methods=["GET"]),
        Route("/health", pages.health, methods=["GET"]),
        Route("/healthz", pages.healthz, methods=["GET"]),
        Route("/readyz", pages.readyz, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
    ]


class Generate:
    """One generating endpoint, as a raw ASGI application: it watches for the client's leaving while it works."""

    def __init__(self, reception: Reception, uploads: Uploads, api: Api) -> None:
        self._reception = reception
        self._uploads = uploads
        self._api = api
        self._tracer = trace.get_tracer("penstock")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, in its own request scope and span."""
        headers = Headers(scope=scope)
        request_id = scope["state"]["request_id"]
        reply = Reply(send, streamed_body(scope), request_id, self._api.style)
        with request_scope(request_id):
            with self._tracer.start_as_current_span(
                f"POST {scope['path']}", read_trace(headers.items()), SpanKind.SERVER, record_exception=False
            ):
                await self._handle(headers, request_id, receive, reply)

    async def _handle(self, headers: Headers, request_id: str, receive: Receive, reply: Reply) -> None:
        arrival = Arrival(request_id)
        try:
            async with self._reception.one(headers, arrival) as tenant:
                reply.before_end = arrival.leave
                reply.add_headers(self._reception.limiter.headers(tenant))
                reply.explains = wants_plan(headers)
                inquiry = await self._inquiry(headers, receive, tenant, reply)
                session = session_digest(tenant, headers, inquiry.ask.cache_key)
                began, body_s = arrival.began, time.perf_counter() - arrival.began
                caller = Caller(
                    tenant=tenant,
                    session=session,
                    request_id=request_id,
                    began=began,
                    body_s=body_s,
                    patience_s=patience_s(headers),
                    repeat=repeat_key(headers, self._reception.auth, tenant, self._api.style.counts),
                )
                _check_resumes(inquiry, caller)
                await _until_gone(receive, reply, self._answer(inquiry, caller, arrival, reply))
        except ClientGone:
            pass
        except PenstockError as error:
            if isinstance(error, RateLimited):
                reply.add_headers(self._reception.limiter.headers(arrival.tenant))
            trace.get_current_span().set_status(StatusCode.ERROR, error.message)
            await reply.error(error)
            forget_way(error)
        except Exception:
            structlog.get_logger("penstock.gateway").exception("request failed")
            await reply.error(Internal("internal error"))

    async def _inquiry(self, headers: Headers, receive: Receive, tenant: str, reply: Reply) -> Inquiry:
        config = self._reception.config
        ignored: list[str] | None = [] if config.unknown_fields == "warn" else None
        async with self._uploads.body(tenant, headers, receive, config.max_body_bytes) as body:
            inquiry = await inquiry_of(self._reception, self._api, body, tenant, ignored)
        reply.ignored(ignored or ())
        return inquiry

    async def _answer(self, inquiry: Inquiry, caller: Caller, arrival: Arrival, reply: Reply) -> None:
        async with self._reception.models.open(inquiry.ask, caller) as completion:
            arrival.begun = True
            reply.seeded(completion.seed)
            shape = inquiry.shape(completion.id, completion.created)
            if inquiry.ask.stream:
                await self._stream(inquiry, completion, shape, reply)
            else:
                await self._whole(inquiry, completion, shape, reply)

    async def _whole(self, inquiry: Inquiry, completion: Completion, shape: Shape, reply: Reply) -> None:
        whole, usage = await whole_of(inquiry, completion, shape)
        if reply.explains:
            reply.explained(explanation(completion))
        reply.timed(server_timing(usage.times, (*PARTS, "total"), usage.cached))
        await reply.json(whole)

    async def _stream(self, inquiry: Inquiry, completion: Completion, shape: Shape, reply: Reply) -> None:
        outbox, told = completion.outbox, telling(shape, self._api.style, completion.place)
        config, begun, explains = self._reception.config, False, reply.explains
        reply.identifies = completion.place is not None
        try:
            with heartbeat(config.first_ping_s, outbox.nudge) as silence:
                while (deltas := await outbox.next()) or not outbox.ended:
                    events: list[bytes] = []
                    if deltas and explains:
                        events.append(reply.explained(explanation(completion)))
                        explains = False
                    first, begun = not begun, True
                    if first:
                        usage = completion.usage()
                        events.append(told.begin(usage))
                        if deltas:
                            reply.timed(server_timing(usage.times, (*BEFORE_FIRST, "first_token"), usage.cached))
                    events += map(told.more, deltas)
                    if data := b"".join(events):
                        await reply.write(data)
                    if beats := silence.due:  # also where all that comes is what the client has already
                        await reply.ping()
                    if first:
                        silence.every(config.ping_s)
                    elif data or beats:
                        silence.heard()
            usage = completion.usage()
            last = told.end(usage)
            await inquiry.settle()
        except PenstockError as error:
            await reply.error(error, shape.fail(error, completion.usage()))
            raise
        await reply.end_events(last, server_timing(usage.times, (*PARTS, "total"), usage.cached))


def _check_resumes(inquiry: Inquiry, caller: Caller) -> None:
    """Raises InvalidRequest for what has no stream to go on with."""
    last = "" if caller.repeat is None else caller.repeat.last_event
    if last and not inquiry.ask.stream:
        right = "only a stream can be gone on with; send it with stream: true"
        raise InvalidRequest(f"{LAST_EVENT} = {last[:40]!r}: {right}", field=LAST_EVENT)


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
