"""What a client has got of an answer, with the tokens behind it."""

from __future__ import annotations

from array import array
from collections.abc import Collection

from penstock.chat.messages import Call, Message
from penstock.chat.sessions import Spoken
from penstock.gateway.completing.delta import Delta


class Heard:
    """Collects one choice: its tokens as generated, its deltas as its client gets them."""

    def __init__(self, ends: Collection[int]) -> None:
        """`ends` are the tokens that may end the answer without being part of its text."""
        self._ends = ends
        self._ids: array[int] = array("I")
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, token: int, delta: Delta) -> None:
        """Takes the next token and what it added."""
        self._ids.append(token)
        self.finish(delta)

    def finish(self, delta: Delta) -> None:
        """Takes a delta without a token of its own."""
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            self._calls.setdefault(call.index, (call.id, call.name, []))[2].append(call.arguments)

    def spoken(self) -> Spoken:
        """All of it."""
        ids = self._ids[:-1] if self._ids and self._ids[-1] in self._ends else self._ids
        calls = tuple(Call(id, name, "".join(pieces)) for id, name, pieces in self._calls.values())
        reasoning = "".join(self._reasoning)
        return Spoken(ids, Message("assistant", "".join(self._content), calls, reasoning=reasoning))
