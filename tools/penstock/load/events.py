"""A streamed answer, read event by event: when its parts came, and what the server counted. What an event says, its API
decides: see `chunks` and `completions`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]
Begun = Callable[[], None]


@dataclass(frozen=True, slots=True)
class AnswerText:
    """What a server said in one turn."""

    content: str = ""
    tool_calls: tuple[Json, ...] = ()
    reasoning: str = ""
    """Not sent back: chat templates drop it."""
    ids: tuple[int, ...] = ()
    """Its tokens, of a server that tells them."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class OwnUsage(msgspec.Struct):
    """What only Penstock says."""

    cached_tokens: dict[str, int] | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    cost: float | None = None


class CountedUsage(msgspec.Struct):
    """The usage of a request, as any server may tell it; None where it does not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    cost: float | None = None
    penstock: OwnUsage | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


_DATA = b"data:"
_LONGEST = 400
"""Characters of an error that are kept."""


def shortened(error: Any) -> str:
    """An error of a server, as far as it is kept."""
    return json.dumps(error, ensure_ascii=False)[:_LONGEST]


def nothing() -> None:
    """For those who want to hear of nothing."""


class EventReader(ABC):
    """Takes the lines of one answer."""

    def __init__(self, begun: Begun = nothing) -> None:
        """Calls `begun` when the first part comes."""
        self._begun = begun
        self.times: list[float] = []
        """When each part of the answer came."""
        self.sizes: list[int] = []
        """Tokens of each part; empty where the server does not tell them."""
        self.usage: CountedUsage | None = None
        self.finish = ""
        """Why the answer ended; empty when it did not."""
        self.error = ""

    def line(self, line: bytes, now: float) -> None:
        """One line of the stream, and when it came."""
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :]
        if b"{" not in data:  # the last one
            return
        try:
            self.event(data, now)
        except msgspec.MsgspecError as error:
            self.error = f"an event that can't be read: {error}"

    @abstractmethod
    def event(self, data: bytes, now: float) -> None:
        """One event. Raises MsgspecError."""

    @abstractmethod
    def answer(self) -> AnswerText:
        """What it said."""

    def came(self, now: float) -> None:
        """A part has come."""
        self.times.append(now)
        if len(self.times) == 1:
            self._begun()
