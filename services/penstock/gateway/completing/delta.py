"""Pieces of choices on their way to a client, merged when it reads more slowly than the model generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token and its alternatives."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int
    """Where its text begins in the choice's text."""


@dataclass(slots=True)
class CallDelta:
    """A piece of a tool call; `id` and `name` come in the first piece only."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class Segment:
    """A run of text of one kind."""

    kind: Kind
    text: str = ""
    call: int = 0
    """Which call it belongs to."""


@dataclass(slots=True)
class Delta:
    """Additions to one choice since its last delta."""

    choice: int
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    """The same reasoning, content and calls once more, in the order in which they were generated; neighbours of one
    kind are one segment."""
    token_ids: list[int] = field(default_factory=list)
    """Every counted token, with or without text; filled only for clients that ask for it."""
    finish: str | None = None
    """stop, length or tool_calls; once per choice, in its last delta."""
    stop: str = ""
    """The stop string that ended the choice, if one did; in its last delta."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs or self.token_ids or self.finish)

    def merge(self, later: Delta) -> None:
        """Appends a later delta of the same choice."""
        self.content += later.content
        self.reasoning += later.reasoning
        self.logprobs += later.logprobs
        self.token_ids += later.token_ids
        self.finish = later.finish or self.finish
        self.stop = later.stop or self.stop
        for call in later.calls:
            self._append_call(call)
        for segment in later.segments:
            self._append(segment)

    def add_text(self, kind: Literal["reasoning", "content"], text: str) -> None:
        """Appends reasoning or content."""
        if kind == "content":
            self.content += text
        else:
            self.reasoning += text
        self._append(Segment(kind, text))

    def add_call(self, call: CallDelta) -> None:
        """Appends a piece of a call; pieces of the same call become one."""
        self._append_call(call)
        self._append(Segment("call", call.arguments, call.index))

    def _append(self, segment: Segment) -> None:
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.kind, last.call) == (segment.kind, segment.call):
            last.text += segment.text
        else:
            self.segments.append(Segment(segment.kind, segment.text, segment.call))

    def _append_call(self, call: CallDelta) -> None:
        if self.calls and self.calls[-1].index == call.index:
            self.calls[-1].arguments += call.arguments
        else:
            self.calls.append(CallDelta(call.index, call.id, call.name, call.arguments))


class Outbox:
    """Hands deltas from the choices of a request to its one reader. Holds at most one delta per choice."""

    def __init__(self, choices: int, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is called when the reader hears that every choice has ended: before it can tell its client."""
        self._ended = ended
        self._pending: dict[int, Delta] = {}
        self._open = choices
        self.error: PenstockError | None = None
        """What ended the request; None: nothing did."""
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Adds a delta to those that the reader has not taken; an empty one is ignored."""
        if not delta:
            return
        waiting = self._pending.get(delta.choice)
        if waiting is None:
            self._pending[delta.choice] = delta
        else:
            waiting.merge(delta)
        if delta.finish:
            self._open -= 1
        self._changed.set()

    def fail(self, error: PenstockError) -> None:
        """Ends the request; the first error counts."""
        self.error = self.error or error
        self._changed.set()

    async def next(self) -> list[Delta]:
        """Waits for deltas and returns them; an empty list when every choice has ended. Raises the error of `fail`."""
        while not self._pending:
            if self.error is not None:
                raise self.error
            if self._open == 0:
                self._ended()
                return []
            self._changed.clear()
            await self._changed.wait()
        pending, self._pending = self._pending, {}
        return list(pending.values())


def fold(deltas: dict[int, Delta], more: list[Delta]) -> None:
    """Merges `more` into the whole choices of a response that is not streamed."""
    for delta in more:
        if delta.choice in deltas:
            deltas[delta.choice].merge(delta)
        else:
            deltas[delta.choice] = delta
