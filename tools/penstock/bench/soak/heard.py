"""What a client heard of an answer, over however many connections, beside what it should have heard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any


@dataclass(slots=True)
class HeardChoice:
    """One of the answers to a request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    """Names and arguments of tools, by their place."""
    finish: str = ""

    def copy(self) -> HeardChoice:
        """One that stays as it is."""
        return HeardChoice([*self.ids], self.text, {**self.calls}, self.finish)


class SoakAnswer:
    """Takes the lines of a stream, or a whole answer. A connection may break off and another one go on."""

    def __init__(self) -> None:
        self.choices: dict[int, HeardChoice] = {}
        self.completion_tokens: int | None = None
        """As the usage says; None before it came."""
        self.last_event = ""
        """The id of the last event that has one."""
        self.times: list[float] = []
        """When tokens came."""
        self.over = False
        """Whether the end of the stream has come."""
        self.error = ""
        """What an error event said."""
        self._id = ""
        self._kept: dict[int, HeardChoice] = {}
        """The choices as they were at the last event."""

    @property
    def tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.ids) for choice in self.choices.values())

    def again(self) -> str:
        """Before it is asked again: what came after the last event with an id will come once more. That id."""
        self.choices = {index: choice.copy() for index, choice in self._kept.items()}
        self.error, self._id, self.completion_tokens = "", "", None
        return self.last_event

    def line(self, line: bytes, at: float) -> None:
        """One line of a stream, which came then."""
        if line.startswith(b"id: "):
            self._id = line[4:].decode()
        elif line == b"data: [DONE]":
            self.over = not self.error
        elif line.startswith(b"data: "):
            self._event(json.loads(line[6:]), at)
            if self._id:
                self.last_event, self._id = self._id, ""
                self._kept = {index: choice.copy() for index, choice in self.choices.items()}

    def whole(self, body: Mapping[str, Any], at: float) -> None:
        """An answer in one piece."""
        self._event(body, at)
        self.over = True

    def _event(self, event: Mapping[str, Any], at: float) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]
        for told in event["choices"]:
            choice = self.choices.setdefault(told["index"], HeardChoice())
            ids = told.get("token_ids") or []
            choice.ids += ids
            if ids:
                self.times.append(at)
            choice.finish = told.get("finish_reason") or choice.finish
            delta = told.get("delta") or told.get("message") or {"content": told.get("text")}
            choice.text += delta.get("content") or ""
            for place, call in enumerate(delta.get("tool_calls") or []):
                made = call["function"]
                said = (made.get("name") or "") + (made.get("arguments") or "")
                at_place = call.get("index", place)
                choice.calls[at_place] = choice.calls.get(at_place, "") + said

    def pause_s(self) -> float:
        """The longest time between two tokens."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)


def wrong_tokens(heard: SoakAnswer, right: SoakAnswer) -> int:
    """How many tokens of a whole answer are others than they should be, missing or too many; at least 1 where only the
    text, a call, the reason of its end or the usage differs."""
    found = 0
    for index in heard.choices.keys() | right.choices.keys():
        one, other = (answer.choices.get(index, HeardChoice()) for answer in (heard, right))
        wrong = sum(a != b for a, b in zip_longest(one.ids, other.ids))
        found += wrong or int((one.text, one.calls, one.finish) != (other.text, other.calls, other.finish))
    return found or int(heard.completion_tokens != right.completion_tokens)


def wrong_beginning(heard: SoakAnswer, right: SoakAnswer) -> int:
    """Likewise of an answer whose client has left: it has to be the beginning of the right one."""
    found = 0
    for index, one in heard.choices.items():
        other = right.choices.get(index, HeardChoice())
        wrong = sum(a != b for a, b in zip(one.ids, other.ids, strict=False)) + max(0, len(one.ids) - len(other.ids))
        calls = all(other.calls.get(place, "").startswith(call) for place, call in one.calls.items())
        found += wrong or int(not (other.text.startswith(one.text) and calls))
    return found
