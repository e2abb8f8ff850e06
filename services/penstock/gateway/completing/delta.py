"""What a choice has gained since its client last heard of it: text, calls and logprobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec


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


TextKind = Literal["reasoning", "content"]
Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class Segment:
    """A run of text of one kind."""

    kind: Kind
    text: str = ""
    call: int = 0
    """Which call it belongs to."""


Entry = TypeVar("Entry")
Entries = list[Entry] | tuple[()]
"""A list that is made with its first entry."""


class Delta(msgspec.Struct, gc=False):
    """Additions to one choice since its last delta. There is one for each token, and most have a few letters of content
    and nothing else: so it costs little to make, and gives the garbage collector nothing to do."""

    choice: int
    content: str = ""
    reasoning: str = ""
    calls: Entries[CallDelta] = ()
    logprobs: Entries[TokenLogprob] = ()
    token_ids: Entries[int] = ()
    """Every counted token, with or without text; filled only for clients that ask for it."""
    proposers: Entries[str] = ()
    """Whose draft each counted token was; empty: nobody's. Filled only for clients that ask for it."""
    finish: str | None = None
    """stop, length or tool_calls; once per choice, in its last delta."""
    stop: str = ""
    """The stop string that ended the choice, if one did; in its last delta."""
    upto: int = 0
    """Counted tokens of the choice so far; one more with the text that comes at its end, two more with its end."""
    _order: Entries[Segment] = ()
    """See `segments`; empty while there is nothing but content."""

    def __bool__(self) -> bool:
        told = self.logprobs or self.token_ids or self.proposers
        return bool(self.content or self.reasoning or self.calls or told or self.finish)

    @property
    def plain(self) -> bool:
        """Whether it adds content and nothing else."""
        return bool(self.content) and not (
            self._order or self.logprobs or self.token_ids or self.proposers or self.finish
        )

    @property
    def segments(self) -> list[Segment]:
        """Reasoning, content and calls in the order in which they were generated; neighbours of one kind are one
        segment."""
        return [*self._order] or ([Segment("content", self.content)] if self.content else [])

    def merge(self, later: Delta) -> None:
        """Appends a later delta of the same choice."""
        if self._order or later._order:
            for segment in later.segments:
                self._append(segment)
        self.content += later.content
        self.reasoning += later.reasoning
        self.logprobs = _grown(self.logprobs, later.logprobs)
        self.token_ids = _grown(self.token_ids, later.token_ids)
        self.proposers = _grown(self.proposers, later.proposers)
        self.finish = later.finish or self.finish
        self.stop = later.stop or self.stop
        self.upto = later.upto
        for call in later.calls:
            self._append_call(call)

    def add_text(self, kind: TextKind, text: str) -> None:
        """Appends reasoning or content."""
        if kind == "reasoning" or self._order:
            self._append(Segment(kind, text))
        if kind == "content":
            self.content += text
        else:
            self.reasoning += text

    def add_call(self, call: CallDelta) -> None:
        """Appends a piece of a call; pieces of the same call become one."""
        self._append(Segment("call", call.arguments, call.index))
        self._append_call(call)

    def add_logprob(self, entry: TokenLogprob) -> None:
        """Appends what one more token had for a logprob."""
        self.logprobs = _grown(self.logprobs, [entry])

    def add_id(self, token: int) -> None:
        """Appends the id of one more token."""
        self.token_ids = _grown(self.token_ids, [token])

    def add_proposer(self, proposer: str) -> None:
        """Appends whose draft one more token was."""
        self.proposers = _grown(self.proposers, [proposer])

    def _append(self, segment: Segment) -> None:
        order = self._order or self.segments
        last = order[-1] if order else None
        if last is not None and (last.kind, last.call) == (segment.kind, segment.call):
            last.text += segment.text
            self._order = order
        else:
            self._order = _grown(order, [Segment(segment.kind, segment.text, segment.call)])

    def _append_call(self, call: CallDelta) -> None:
        if self.calls and self.calls[-1].index == call.index:
            self.calls[-1].arguments += call.arguments
        else:
            self.calls = _grown(self.calls, [CallDelta(call.index, call.id, call.name, call.arguments)])


def _grown(mine: Entries[Entry], more: Entries[Entry]) -> Entries[Entry]:
    """`mine` with more at its end; a list grows in its place."""
    if not more:
        return mine
    if not mine:
        return list(more)
    assert isinstance(mine, list)
    mine += more
    return mine
