"""From the items of a conversation to its messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TypeVar

from penstock.chat.messages import Call, Message, PictureLink
from penstock.errors import InvalidRequest
from penstock.gateway.api.extension import CacheControl, check_marks
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.api.responses.bodies import InputItem, InputPart

Value = TypeVar("Value")
Mark = tuple[int, str | None, str, CacheControl]
"""The number of its message, the text up to it if it is inside, its place, the mark."""

_TEXT = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Dialogue:
    """Messages, made item by item. What the assistant said in one turn becomes one message, as templates expect it."""

    def __init__(self, instructions: str | None, nodes: Nodes) -> None:
        self.messages: list[Message] = [Message("system", instructions)] if instructions else []
        self.marks: list[Mark] = []
        self._nodes = nodes
        self._turn: _Turn | None = None
        """The assistant's message that may still grow."""

    def add(self, items: Sequence[InputItem], place: str | None = None) -> None:
        """Appends items; `place` is where they stand in the body, None for those of a stored response."""
        for at, item in enumerate(items):
            self._add(item, f"{place}[{at}]" if place else "previous_response_id")
        self._write()

    def _add(self, item: InputItem, field: str) -> None:
        kind = item.type or "message"
        if kind == "message":
            self._message(item, field)
        elif kind == "reasoning":
            self._said(Message("assistant", reasoning=_reasoning(item, field)))
        elif kind == "function_call":
            call = _call(item, field)
            self._nodes.add(call.arguments.encode(), f"{field}.arguments")
            self._said(Message("assistant", calls=(call,)))
        elif kind == "function_call_output":
            call_id = _required(item.call_id, f"{field}.call_id")
            self._other(_message("tool", item.output, f"{field}.output", call_id=call_id))
        else:
            what = f"{field}.type: {kind[:40]!r} is not supported"
            raise InvalidRequest(what, field=f"{field}.type", code="unsupported_parameter")
        if item.cache_control is not None:
            check_marks(len(self.marks) + 1)
            self.marks.append((len(self.messages) - 1, None, f"{field}.cache_control", item.cache_control))

    def _message(self, item: InputItem, field: str) -> None:
        role = _required(item.role, f"{field}.role")
        if role == "user":
            message = _message(role, item.content, f"{field}.content")
        else:
            message = Message("system" if role == "developer" else role, _content(item.content, f"{field}.content"))
        if role == "assistant":
            self._said(message)
        else:
            self._other(message)
        parts = item.content if isinstance(item.content, list) else []
        if all(part.cache_control is None for part in parts):
            return
        text = self._turn.said().removesuffix(message.content) if self._turn is not None else ""
        for number, part in enumerate(parts):
            text += part.text or ""
            if part.cache_control is not None:
                check_marks(len(self.marks) + 1)
                place = f"{field}.content[{number}].cache_control"
                self.marks.append((len(self.messages) - 1, text, place, part.cache_control))

    def _said(self, more: Message) -> None:
        """Adds to the assistant's message, in which reasoning stands first and calls last."""
        if self._turn is None or not self._turn.goes_on_with(more):
            self._other(more)
            self._turn = _Turn()
        self._turn.add(more)

    def _other(self, message: Message) -> None:
        self._write()
        self.messages.append(message)
        self._turn = None

    def _write(self) -> None:
        if self._turn is not None:
            self.messages[-1] = self._turn.message()


class _Turn:
    """The assistant's message in parts: joined once, since a client may send very many."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []

    def goes_on_with(self, more: Message) -> bool:
        """Whether that can be a part of it."""
        return not ((more.reasoning and (self._content or self._calls)) or (more.content and self._calls))

    def add(self, more: Message) -> None:
        self._content += [more.content] if more.content else []
        self._reasoning += [more.reasoning] if more.reasoning else []
        self._calls += more.calls

    def said(self) -> str:
        """Its content so far."""
        return "".join(self._content)

    def message(self) -> Message:
        """As far as it is known."""
        return Message("assistant", self.said(), reasoning="".join(self._reasoning), calls=tuple(self._calls))


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: opaque to programs, not a secret from the client whose text it is."""
    return base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def _reasoning(item: InputItem, field: str) -> str:
    if item.content:
        return _content(item.content, f"{field}.content")
    if item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            what = f"{field}.encrypted_content: was not made by this server"
            raise InvalidRequest(what, field=f"{field}.encrypted_content") from None
    return _content(item.summary or "", f"{field}.summary")


def _call(item: InputItem, field: str) -> Call:
    call_id = _required(item.call_id, f"{field}.call_id")
    name = _required(item.name, f"{field}.name")
    return Call(call_id, name, _required(item.arguments, f"{field}.arguments"))


def _content(content: str | list[InputPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return _required(content, field)
    return "".join(_part(part, f"{field}[{at}]") for at, part in enumerate(content))


def _message(role: str, content: str | list[InputPart] | None, field: str, *, call_id: str = "") -> Message:
    """Of texts and pictures."""
    parts = _shown(content, field)
    texts = "".join(part for part in parts if isinstance(part, str)) if parts else _content(content, field)
    return Message(role, texts, call_id=call_id, parts=parts)


def _shown(content: str | list[InputPart] | None, field: str) -> tuple[str | PictureLink, ...]:
    """The parts of a message that has pictures; none of other messages."""
    if not isinstance(content, list) or all(part.type != "input_image" for part in content):
        return ()
    found: list[str | PictureLink] = []
    for at, part in enumerate(content):
        where = f"{field}[{at}].image_url"
        is_picture = part.type == "input_image"
        found.append(
            PictureLink(_required(part.image_url, where), where) if is_picture else _part(part, f"{field}[{at}]")
        )
    return tuple(found)


def _part(part: InputPart, field: str) -> str:
    if part.type == "refusal":
        return _required(part.refusal, f"{field}.refusal")
    if part.type not in _TEXT:
        what = f"{field}.type: {part.type[:40]!r} is not supported; send parts of type input_text"
        raise InvalidRequest(what, field=f"{field}.type", code="unsupported_parameter")
    return _required(part.text, f"{field}.text")


def _required(value: Value | None, field: str) -> Value:
    if value is None:
        raise InvalidRequest(f"{field}: is required", field=field)
    return value
