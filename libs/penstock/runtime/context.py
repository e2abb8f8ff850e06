"""Context variables hold the request and the trace that the current task works for; no argument carries them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import structlog
from opentelemetry import trace
from structlog.contextvars import bound_contextvars, get_contextvars


@contextmanager
def request_scope(request_id: str) -> Iterator[None]:
    """Binds the request id for logs and outgoing calls; an empty one binds nothing."""
    with bound_contextvars(request_id=request_id) if request_id else nullcontext():
        yield


def current_request_id() -> str:
    """The id of the request that this task works for, or an empty string."""
    return str(get_contextvars().get("request_id", ""))


def trace_id() -> str:
    """The current trace's id in hex, or an empty string."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def add_trace_id(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """structlog processor: puts the trace id into every line."""
    found = trace_id()
    if found:
        event["trace_id"] = found
    return event
