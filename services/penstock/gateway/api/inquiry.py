"""What a public API is to the door: it reads bodies into asks, and writes answers as JSON, whole or as events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.completing.delta import Delta
from penstock.gateway.completing.repeating import TOKENS
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.ask import Ask

Json = dict[str, Any]
Value = TypeVar("Value")


class Apart(Protocol):
    """Runs work where it holds nobody up."""

    def __call__(self, work: Callable[[], Value], more: int = 0) -> Awaitable[Value]:
        """The value of `work`, which reads as much as the body has, and `more` bytes."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Who sends a body, and where it is read."""

    tenant: str
    apart: Apart
    ignored: list[str] | None = None
    """Gets the unknown fields of the body; None: they are errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How an API writes what all its responses have in common."""

    error: Callable[[PenstockError, str], Json]
    """The body of an error, given the id of its request."""
    named: bool = False
    """Whether an event's name, its `type`, also stands before its data."""
    ping: bytes = b": ping\n\n"
    """What a silent stream gets; clients skip it."""
    last: bytes = b""
    """The end of every stream."""
    counts: str = TOKENS
    """What ids of events count in a stream that can be gone on with: the tokens until then, or, under a name of the
    API's own, the events."""
    id_header: str = "x-request-id"
    """The header in which clients look for the request's id, besides x-request-id."""

    def last_word(self, error: PenstockError, request_id: str) -> Json:
        """The event that ends a stream which has begun, where nothing is known of its answer."""
        body = self.error(error, request_id)
        return body if not self.named or "type" in body else {"type": "error", **body}

    def written(self, events: Sequence[Json]) -> bytes:
        """Server-sent events."""
        if not self.named:
            return b"".join(b"data: " + encode(event) + b"\n\n" for event in events)
        return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n" for event in events)


class Shape(Protocol):
    """Writes one answer. Folding its events gives the whole."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The response to a request without stream."""

    def begin(self, usage: Usage) -> list[Json]:
        """The events before the first delta."""

    def events(self, delta: Delta) -> list[Json]:
        """The events for one delta."""

    def text(self, delta: Delta) -> bytes | None:
        """The events for a plain delta as they are written, by a shorter way; None where `events` has to be asked."""

    def end(self, usage: Usage) -> list[Json]:
        """The events after the last delta."""

    def fail(self, error: PenstockError, usage: Usage) -> list[Json]:
        """The events that end a stream which has failed after its begin."""


class Inquiry(Protocol):
    """One request in one API."""

    @property
    def ask(self) -> Ask:
        """What the client wants."""

    def shape(self, id: str, created: int) -> Shape:
        """Writes the answer; `id` is the completion's."""

    async def settle(self) -> None:
        """Called before the last of the answer is sent, so that the client can build on it at once."""


class Api(Protocol):
    """One generating endpoint."""

    style: Style

    async def read(self, body: bytes, visit: Visit) -> Inquiry:
        """The inquiry that a body makes. Raises PenstockError."""


def encode(value: object) -> bytes:
    """Encodes a value as JSON."""
    return msgspec.json.encode(value)
