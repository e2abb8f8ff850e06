"""A streamed chat completion, read event by event."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.load.events import AnswerText, Begun, CountedUsage, EventReader, nothing, shortened


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


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: CountedUsage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode


class AnswerReader(EventReader):
    """Takes the lines of one chat completion."""

    def __init__(self, begun: Begun = nothing) -> None:
        super().__init__(begun)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}

    def event(self, data: bytes, now: float) -> None:
        """One chunk."""
        event = _DECODE(data)
        if event.error:
            self.error = shortened(event.error)
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            self.finish = choice.finish_reason or self.finish
            if choice.delta is not None and self._add(choice.delta):
                self.came(now)

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
        return AnswerText("".join(self._content), tuple(calls), "".join(self._reasoning))
