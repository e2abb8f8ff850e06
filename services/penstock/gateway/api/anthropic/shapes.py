"""Messages, their events and their errors.

Blocks come one after the other: each is started, grows by deltas and stops before the next begins. The whole message
is what the events build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.api.inquiry import Json, Style, encode
from penstock.gateway.api.openai.shapes import own_usage
from penstock.gateway.api.template import HOLE, template
from penstock.gateway.completing.delta import Delta, Segment
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.ask import Ask

_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_LONG_S = 3600.0


def message_error(error: PenstockError, request_id: str) -> Json:
    """Anthropic's error object; the field stands in the message."""
    kind = _ERRORS.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


STYLE = Style(
    error=message_error,
    named=True,
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
    counts="message events",
    id_header="request-id",
)


def model_json(name: str, created: int) -> Json:
    """Anthropic's form of a model."""
    instant = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"id": name, "type": "model", "display_name": name, "created_at": instant}


class MessageShape:
    """One message."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self._id = id
        self._model = ask.model
        self._keeps = [keep.seconds for prompt in ask.prompts for keep in getattr(prompt, "keeps", ())]
        self._content: list[Json] = []
        self._open: Segment | None = None
        """What the last block is, without its text; None when it has stopped."""
        self._texts: list[str] = []
        """Its text so far."""
        self._template: bytes | None = None
        """The event by which it grows, when it is content."""
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The response to a request without stream."""
        for delta in choices:
            self.events(delta)
        self._close()
        return self._message(usage, self._content)

    def begin(self, usage: Usage) -> list[Json]:
        """The message is there, with nothing in it."""
        return [{"type": "message_start", "message": self._message(usage, [])}]

    def events(self, delta: Delta) -> list[Json]:
        """The events for one delta."""
        events: list[Json] = []
        for segment in delta.segments:
            if self._open is None or (self._open.kind, self._open.call) != (segment.kind, segment.call):
                events += [*self._close(), self._start(segment, delta)]
            self._texts.append(segment.text)
            if segment.text:
                events.append(self._delta(*_grown(segment)))
        if delta.finish:
            reason = "stop_sequence" if delta.stop else _REASONS.get(delta.finish, "end_turn")
            self._end = {"stop_reason": reason, "stop_sequence": delta.stop or None}
        return events

    def text(self, delta: Delta) -> bytes | None:
        """The event for a plain delta that goes on with a text."""
        if self._template is None or not delta.plain:
            return None
        self._texts.append(delta.content)
        return self._template % encode(delta.content)

    def end(self, usage: Usage) -> list[Json]:
        """Ends the last block and the message."""
        told = {"type": "message_delta", "delta": self._end, "usage": self._usage(usage)}
        return [*self._close(), told, {"type": "message_stop"}]

    def fail(self, _error: PenstockError, _usage: Usage) -> list[Json]:
        """Nothing but the error object itself."""
        return []

    def _message(self, usage: Usage, content: list[Json]) -> Json:
        head = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **self._end, "usage": self._usage(usage)}

    def _start(self, segment: Segment, delta: Delta) -> Json:
        self._open = Segment(segment.kind, "", segment.call)
        if segment.kind == "content":
            block: Json = {"type": "text", "text": "", "citations": None}
        elif segment.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            call = next(call for call in delta.calls if call.index == segment.call)
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._content.append(block)
        if segment.kind == "content":
            self._template = template(STYLE.written([self._delta(*_grown(Segment("content", HOLE)))]))
        return {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _close(self) -> list[Json]:
        """Ends the open block."""
        if self._open is None:
            return []
        text, block, events = "".join(self._texts), self._content[-1], []
        self._texts, self._template = [], None
        if self._open.kind == "content":
            block["text"] = text
        elif self._open.kind == "call":
            block["input"] = _object(text)
        else:
            block |= {"thinking": text, "signature": hashlib.sha256(text.encode(errors="replace")).hexdigest()}
            events.append(self._delta("signature_delta", "signature", block["signature"]))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]

    def _delta(self, kind: str, name: str, text: str) -> Json:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _usage(self, usage: Usage) -> Json:
        """Every token of the prompt is counted once: read from the cache, newly kept in it, or neither."""
        written = usage.written_tokens
        long = bool(self._keeps) and self._keeps[-1] >= _LONG_S
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if long else written,
                "ephemeral_1h_input_tokens": written if long else 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": "standard",
            "penstock": own_usage(usage),
        }


def _grown(segment: Segment) -> tuple[str, str, str]:
    if segment.kind == "content":
        return "text_delta", "text", segment.text
    if segment.kind == "reasoning":
        return "thinking_delta", "thinking", segment.text
    return "input_json_delta", "partial_json", segment.text


def _object(text: str) -> Json:
    """The input of a call; empty when the limit of tokens has cut it, as stop_reason says then."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
