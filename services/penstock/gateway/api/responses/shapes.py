"""The response object, and the events that build it.

The events follow a fixed grammar: created, in_progress; for each item added, its parts and deltas, done; at last
completed, incomplete or failed. An item is done before the next begins. The whole response is what the events build.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import PenstockError
from penstock.gateway.api.fields import decoded
from penstock.gateway.api.inquiry import Json, Style, encode
from penstock.gateway.api.openai.shapes import error_json, logprob_entries, own_usage
from penstock.gateway.api.responses.asks import ENCRYPTED, ResponseOrder
from penstock.gateway.api.responses.items import sealed
from penstock.gateway.api.template import HOLE, template
from penstock.gateway.completing.delta import Delta, Segment
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.ask import Ask

STYLE = Style(error=error_json, named=True, counts="response events")
_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


class ResponseShape:
    """One response."""

    def __init__(self, order: ResponseOrder, ask: Ask, id: str, created: int) -> None:
        self._id = id
        self._encrypted = order.includes(ENCRYPTED)
        self._logprobs: list[Json] | None = None if ask.sampling.logprobs is None else []
        self._number = 0
        self._output: list[Json] = []
        self._open: Segment | None = None
        """What the last item is, without its text; None when it is done."""
        self._texts: list[str] = []
        """Its text so far."""
        self._template: bytes | None = None
        """The event by which it grows, when it is a message without logprobs."""
        self._finish = "stop"
        self.response = {"id": f"resp_{id}", "object": "response", "created_at": created, **_echo(order, ask)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The response to a request without stream."""
        for delta in choices:
            self.events(delta)
        self.end(usage)
        return self.response

    def begin(self, _usage: Usage) -> list[Json]:
        """The response is there, with nothing in it."""
        return [
            self._event(f"response.{name}", response=self._snapshot("in_progress"))
            for name in ("created", "in_progress")
        ]

    def events(self, delta: Delta) -> list[Json]:
        """The events for one delta."""
        events: list[Json] = []
        logprobs = logprob_entries(delta.logprobs) if self._logprobs is not None else []
        if self._logprobs is not None:
            self._logprobs += logprobs
        for segment in delta.segments:
            if self._open is None or (self._open.kind, self._open.call) != (segment.kind, segment.call):
                events += self._close("completed") + self._begin(segment, delta)
            self._texts.append(segment.text)
            if segment.text:
                events.append(self._delta(segment, logprobs if segment.kind == "content" else []))
        self._finish = delta.finish or self._finish
        return events

    def text(self, delta: Delta) -> bytes | None:
        """The event for a plain delta that goes on with a message."""
        if self._template is None or not delta.plain:
            return None
        self._texts.append(delta.content)
        number, self._number = self._number, self._number + 1
        return self._template % (b"%d" % number, encode(delta.content))

    def end(self, usage: Usage) -> list[Json]:
        """Ends the last item and the response."""
        cut = self._finish == "length"
        events = [] if self._output else self._begin(Segment("content"), Delta(0))
        events += self._close("incomplete" if cut else "completed")
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self._output,
            "usage": response_usage(usage),
        }
        return [*events, self._event("response.incomplete" if cut else "response.completed", response=self.response)]

    def fail(self, error: PenstockError, usage: Usage) -> list[Json]:
        """The error, and the response as far as it came."""
        events = self._close("incomplete")
        self.response |= {
            "error": {
                "code": "rate_limit_exceeded" if error.http_status == 429 else "server_error",
                "message": error.message,
            },
            "output": self._output,
            "usage": response_usage(usage),
        }
        event = self._event("error", code=error.code or error.kind, message=error.message, param=error.field)
        return [*events, event, self._event("response.failed", response=self._snapshot("failed"))]

    def _begin(self, segment: Segment, delta: Delta) -> list[Json]:
        """Adds an item for the segment."""
        at, self._open = len(self._output), Segment(segment.kind, "", segment.call)
        item: Json = {"id": f"{_PREFIXES[segment.kind]}_{self._id}_{at}", "status": "in_progress"}
        if segment.kind == "content":
            item |= {"type": "message", "role": "assistant", "content": []}
        elif segment.kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            call = next(call for call in delta.calls if call.index == segment.call)
            item |= {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        self._output.append(item)
        events = [self._event("response.output_item.added", output_index=at, item=dict(item))]
        if segment.kind != "call":
            events.append(self._placed("response.content_part.added", content_index=0, part=self._part("", [])))
        if segment.kind == "content" and self._logprobs is None:
            grown = {**self._delta(Segment("content", HOLE), []), "sequence_number": HOLE}
            self._number -= 1  # that was no event
            self._template = template(STYLE.written([grown]))
        return events

    def _delta(self, segment: Segment, logprobs: list[Json]) -> Json:
        if segment.kind == "content":
            return self._placed("response.output_text.delta", content_index=0, delta=segment.text, logprobs=logprobs)
        if segment.kind == "reasoning":
            return self._placed("response.reasoning_text.delta", content_index=0, delta=segment.text)
        return self._placed("response.function_call_arguments.delta", delta=segment.text)

    def _close(self, status: str) -> list[Json]:
        """Ends the open item."""
        if self._open is None:
            return []
        text, item = "".join(self._texts), self._output[-1]
        self._texts, self._template = [], None
        item["status"] = status
        if self._open.kind == "call":
            item["arguments"] = text
            done = [self._placed("response.function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            part = self._part(text, self._logprobs or [])
            item["content"] = [part]
            said = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            name = "output_text" if self._open.kind == "content" else "reasoning_text"
            done = [
                self._placed(f"response.{name}.done", content_index=0, text=text, **said),
                self._placed("response.content_part.done", content_index=0, part=part),
            ]
            if self._open.kind == "reasoning" and self._encrypted:
                item["encrypted_content"] = sealed(text)
        self._open = None
        return [*done, self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))]

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        """The part that the open item has; a message has the logprobs of earlier reasoning too."""
        if self._open is not None and self._open.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _placed(self, kind: str, **values: Any) -> Json:
        at = len(self._output) - 1
        return self._event(kind, item_id=self._output[at]["id"], output_index=at, **values)

    def _event(self, kind: str, **values: Any) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **values}

    def _snapshot(self, status: str) -> Json:
        return {**self.response, "status": status}


def response_usage(usage: Usage) -> Json:
    """The usage object of a response, with every field, zeros included."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.written_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "penstock": own_usage(usage),
    }


def _echo(order: ResponseOrder, ask: Ask) -> Json:
    """What a response repeats of its request."""
    body = order.body
    effort, summary = (body.reasoning.effort, body.reasoning.summary) if body.reasoning else (None, None)
    tools = [
        {
            "type": tool.type,
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in body.tools or ()
    ]
    chosen = decoded(body.tool_choice, "tool_choice")
    form = decoded(body.text.format, "text.format") if body.text else None
    return {
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": order.stored,
        "temperature": ask.sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": "auto" if chosen is None else chosen,
        "tools": tools,
        "top_logprobs": ask.sampling.logprobs or 0,
        "top_p": ask.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
