"""What is known of a family: its markers, what its calls look like, and how it is recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from penstock.chat.formats.arguments import Arguments, JsonArguments
from penstock.chat.formats.pattern import Pattern


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What stands around the reasoning at the beginning of an answer."""

    open: str
    close: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCalls:
    """Calls exactly as the family's chat template prints them, white space included: the form that is asked for."""

    begin: str = ""
    """In front of the first call."""
    before: str
    """From there to the function's name."""
    behind: str = ""
    """Between the name and the arguments."""
    number: bool = False
    """Whether a number stands right behind the name and a colon."""
    after: str = ""
    """Behind the arguments of each call."""
    between: str | None = ""
    """Between two calls; None: an answer has one call at most."""
    end: str = ""
    """Behind the last call."""


THINK = ReasoningMarkers("<think>", "</think>")


def _hex_id(name: str, given: str, drawn: bytes) -> str:
    return f"call_{drawn.hex()}"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How one family writes tool calls, and its reasoning.

    A call is a head, which holds the function's name, then its arguments. After them comes either what stands between
    two calls, with the next call's name, or a tail; after a tail there may be content, or another head.
    """

    name: str
    heads: tuple[Pattern, ...]
    """What a call may begin with, alternatives; empty: no calls are known."""
    nexts: tuple[Pattern, ...] = ()
    """What may stand between the arguments of one call and those of the next, alternatives."""
    tails: tuple[Pattern, ...] = ()
    """What may stand behind the arguments of the last call, alternatives."""
    arguments: Callable[[], Arguments] = JsonArguments
    opening: str = "{"
    """The first character of arguments."""
    leads: bool = False
    """Whether calls come only at the beginning of an answer, or right behind another call."""
    written: WrittenCalls | None = None
    """None: no calls are known."""
    values: Literal["json", "python", "gemma"] = "json"
    """How arguments are written."""
    markers: tuple[str, ...] = ()
    """Texts that belong to calls; those that are added tokens are shown to the parser though they are special."""
    reasoning: ReasoningMarkers = THINK
    call_id: Callable[[str, str, bytes], str] = _hex_id
    """A call's id for clients, from its function's name, what the model wrote in the place of an id, and 12 bytes that
    no other call has."""
    recognised: Callable[[str], bool] = lambda template: False
    """Whether a chat template's text is one of this family's."""

    @property
    def control(self) -> Collection[str]:
        """The texts that mean more than they say: of calls and of reasoning."""
        return {*self.markers, self.reasoning.open, self.reasoning.close}

    @property
    def opens(self) -> Collection[str]:
        """The texts with which heads begin, as far as they are markers."""
        return {str(head[0]) for head in self.heads} & set(self.markers)

    @cached_property
    def openings(self) -> re.Pattern[str]:
        """Finds a character with which a head may begin."""
        first = {str(head[0])[0] for head in self.heads}
        return re.compile("|".join(re.escape(letter) for letter in sorted(first)) or "(?!)")

    def thinks(self, template: str, added: Collection[str]) -> bool:
        """Whether answers may begin with reasoning, by the model's chat template and its added tokens."""
        opening = self.reasoning.open.rstrip()
        return opening in template or opening in added

    def shows(self, token: str) -> bool:
        """Whether the text of a special token is part of calls or of reasoning."""
        return any(token in text for text in self.control)
