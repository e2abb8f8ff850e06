"""A streamed chat completion, read event by event: when its parts came, what it said, and what the server counted."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.load.conversation import AnswerText


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OwnUsage(msgspec.Struct):
    """What only Penstock says."""

    cached_tokens: dict[str, int] | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    cost: float | None = None


class CountedUsage(msgspec.Struct):
    """The usage of a request, as any server may tell it; None where it does not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    cost: float | None = None
    penstock: _OwnUsage | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: CountedUsage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode
_DATA = b"data:"
_LONGEST = 400
"""Characters of an error that are kept."""


class AnswerReader:
    """Takes the lines of one answer."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each part of the answer came."""
        self.usage: CountedUsage | None = None
        self.finish = ""
        """Why the answer ended; empty when it did not."""
        self.error = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}

    def line(self, line: bytes, now: float) -> None:
        """One line of the stream, and when it came."""
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if not data.startswith(b"{"):
            return
        try:
            event = _DECODE(data)
        except msgspec.MsgspecError as error:
            self.error = f"an event that can't be read: {error}"
            return
        if event.error:
            self.error = json.dumps(event.error, ensure_ascii=False)[:_LONGEST]
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            self.finish = choice.finish_reason or self.finish
            if choice.delta is not None and self._add(choice.delta):
                self.times.append(now)

    def _add(self, delta: _Delta) -> bool:
        """Whether there is anything in it."""
        reasoning = delta.reasoning_content or delta.reasoning
        if delta.content:
            self._content.append(delta.content)
        if reasoning:
            self._reasoning.append(reasoning)
        for call in delta.tool_calls or ():
            known = self._calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            known["id"] += call.id or ""
            if call.function is not None:
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
        return bool(delta.content or reasoning or delta.tool_calls)

    def answer(self) -> AnswerText:
        """What it said."""
        calls = [
            {
                "id": call["id"] or f"call_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for index, call in sorted(self._calls.items())
        ]
        return AnswerText("".join(self._content), calls, "".join(self._reasoning))
