"""From a body to the whole answer: the way that requests of the HTTP door and lines of batches have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from penstock.errors import NotFound, PenstockError, forget_way
from penstock.gateway.api.anthropic.api import MessagesApi
from penstock.gateway.api.inquiry import Api, Inquiry, Json, Shape, Visit
from penstock.gateway.api.openai.api import CompletionApi
from penstock.gateway.api.openai.asks import chat_ask, completion_ask
from penstock.gateway.api.responses.api import ResponsesApi
from penstock.gateway.batches.answering import LineAsk
from penstock.gateway.completing.completion import Caller, Completion
from penstock.gateway.completing.usage import Usage
from penstock.gateway.door.reception import Reception
from penstock.runtime.context import request_scope

_THREAD_BODY = 64 * 1024
"""Bytes from which a body is decoded in a thread."""
Value = TypeVar("Value")


def generating(reception: Reception) -> Mapping[str, Api]:
    """The endpoints that generate, by their paths."""
    max_n = reception.config.max_n
    return {
        "/v1/chat/completions": CompletionApi(chat_ask, max_n),
        "/v1/completions": CompletionApi(completion_ask, max_n),
        "/v1/responses": ResponsesApi(reception.responses),
        "/v1/messages": MessagesApi(),
    }


async def inquiry_of(
    reception: Reception, api: Api, body: bytes, tenant: str, ignored: list[str] | None = None
) -> Inquiry:
    """What a body asks. `ignored` as in `Visit`. Raises PenstockError."""
    length = len(body)

    def apart(work: Callable[[], Value], more: int = 0) -> Awaitable[Value]:
        size = length + more
        return reception.threads.run(work, size if size >= _THREAD_BODY else 0, tenant)

    return await api.read(body, Visit(tenant, apart, ignored))


async def whole_of(inquiry: Inquiry, completion: Completion, shape: Shape) -> tuple[Json, Usage]:
    """The answer when it is whole, and what it cost. Raises PenstockError."""
    choices = await completion.outbox.whole()
    usage = completion.usage()
    whole = shape.whole(choices, usage)
    await inquiry.settle()
    return whole, usage


class LineDoor:
    """Where lines of batches come in. They pass what requests do, but for the key, which was looked at when the batch
    was begun, and for the limits of requests: a line waits for room instead, and only its tenant's money counts."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._apis = generating(reception)
        self._tracer = trace.get_tracer("penstock")

    def served(self, model: str) -> str | None:
        """Why no request for a model of that name can be served; None: it can."""
        try:
            self._reception.models.of(model)
        except NotFound as error:
            return error.message
        return None

    async def answer(self, ask: LineAsk) -> Json:
        """The body of the answer. Raises PenstockError."""
        with request_scope(ask.id), self._tracer.start_as_current_span(f"line {ask.endpoint}", kind=SpanKind.INTERNAL):
            try:
                return await self._answer(ask)
            except PenstockError as error:
                trace.get_current_span().set_status(StatusCode.ERROR, error.message)
                forget_way(error)
                raise

    def error(self, ask: LineAsk, error: PenstockError) -> Json:
        """The body of an error."""
        return self._apis[ask.endpoint].style.error(error, ask.id)

    async def _answer(self, ask: LineAsk) -> Json:
        reception = self._reception
        reception.limiter.check_money(ask.tenant)
        caller = Caller.of_line(ask.tenant, ask.id, patience_s=ask.patience_s, taken=ask.taken)
        ignored: list[str] | None = [] if reception.config.unknown_fields == "warn" else None
        inquiry = await inquiry_of(reception, self._apis[ask.endpoint], ask.body, ask.tenant, ignored)
        async with reception.models.open(inquiry.ask, caller) as completion:
            shape = inquiry.shape(completion.id, completion.created)
            return (await whole_of(inquiry, completion, shape))[0]
