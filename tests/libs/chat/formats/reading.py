"""What a parser's events come to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.chat.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.chat.formats.format import ToolFormat
from penstock.chat.formats.parser import AssistantParser


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    called: bool = False

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(self.calls), "indices count up from 0"
                self.calls.append([event.name, ""])
                self.given.append(event.given)
            elif isinstance(event, CallArguments):
                assert event.index == len(self.calls) - 1, "pieces belong to the call that is open"
                assert event.text
                self.calls[event.index][1] += event.text


def parse(
    family: ToolFormat,
    *chunks: str,
    offered: Collection[str] | None = ("f", "get_weather"),
    think: bool = True,
    thinking: bool = False,
) -> Parsed:
    parser, parsed = AssistantParser(family, offered=offered, think=think, thinking=thinking), Parsed()
    for chunk in chunks:
        parsed.add(parser.feed(chunk))
        assert parser.held <= 512
    parsed.add(parser.finish())
    parsed.called = parser.called
    return parsed
