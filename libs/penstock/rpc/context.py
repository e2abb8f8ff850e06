"""The metadata of every call: the request id and the W3C trace context.

Outgoing calls pass `metadata=outgoing()`; incoming ones are read by the server's interceptor. An explicit
argument rather than a client interceptor: grpc.aio puts an extra generator around every intercepted stream.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import propagate
from opentelemetry.context import Context

from penstock.rpc.bounds import is_id
from penstock.runtime.context import current_request_id

REQUEST_ID = "x-request-id"
TOLD = "penstock-told"
"""In the trailers of a call whose answer went another way, by a stream of its own: how much of it was sent there. The
caller may learn of the call's end first."""

Metadata = tuple[tuple[str, str | bytes], ...]


def outgoing(*more: tuple[str, str]) -> Metadata:
    """Metadata for a call made on behalf of the current request."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    pairs: list[tuple[str, str | bytes]] = [*carrier.items(), *more]
    request_id = current_request_id()
    if request_id:
        pairs.append((REQUEST_ID, request_id))
    return tuple(pairs)


def trace_parent() -> str:
    """The current span as a W3C `traceparent`, for messages that stand for a call; empty without a span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


def safe_request_id(text: str | None) -> str | None:
    """`text` when it may be used as an id in logs and metadata, else None."""
    return text if text and is_id(text) else None


def read_trace(pairs: Iterable[tuple[str, str | bytes]]) -> Context:
    """The caller's trace context; malformed or absent starts a new trace, never an error."""
    carrier = {key: value for key, value in pairs if isinstance(value, str)}
    return propagate.extract(carrier)
