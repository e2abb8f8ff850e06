"""What a parser of assistant text has found."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a think block."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts the calls of this text from 0."""

    index: int
    name: str
    given: str = ""
    """What the model wrote in the place of the call's id, where its format has one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


def merged_events(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind as one event."""
    merged: list[Event] = []
    for (kind, index), run in groupby(events, key=_kind):
        first, *rest = run
        if not rest or isinstance(first, CallStart):
            merged += [first, *rest]
            continue
        text = "".join(event.text for event in (first, *rest) if not isinstance(event, CallStart))
        merged.append(CallArguments(index, text) if kind is CallArguments else kind(text))
    return merged


def _kind(event: Event) -> tuple[Any, int]:
    return type(event), event.index if isinstance(event, CallStart | CallArguments) else 0
