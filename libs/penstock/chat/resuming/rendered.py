"""A rendered conversation, and which part of a longer one it spares."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.chat.messages import Message
from penstock.chat.resuming.waypoint import Rest, Waypoint

_FIRST = 2
"""Messages at the beginning at which most templates look."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text that a chat template made of messages."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    waypoint: Waypoint | None = None
    """Where a longer conversation can go on from this one."""
    open: bool = False
    """Whether the text ends within the last message, which the answer continues."""

    def leads_to(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation begins with all messages on which the text up to the waypoint depends."""
        assert self.waypoint is not None, "else nothing is resumed"
        through = self.waypoint.through
        return tuple(messages[:through]) == self.messages[:through]

    def seen(self, messages: Collection[Message]) -> Collection[int]:
        """Which messages of a longer conversation to show the template: those from the waypoint on, the one before, and
        those at which many templates look before their loop: the first ones, and the last of each role."""
        assert self.waypoint is not None, "else nothing is resumed"
        at = self.waypoint.at
        last = {message.role: number for number, message in enumerate(self.messages[:at])}
        return {*range(min(_FIRST, at)), *last.values(), *range(max(at - 1, 0), len(messages))}

    def continued(self, messages: Sequence[Message], rest: Rest) -> Rendered:
        """A longer conversation. Shares messages with this one, so that both together hold them once."""
        assert self.waypoint is not None, "else nothing is resumed"
        through = self.waypoint.through
        together = (*self.messages[:through], *messages[through:])
        return Rendered(self.text[: self.waypoint.chars] + rest.text, together, rest.waypoint)


def furthest(messages: Sequence[Message], earlier: Sequence[Rendered]) -> Rendered | None:
    """The rendering that can be resumed at the latest place, for this conversation."""
    places = [(each.waypoint.at, number) for number, each in enumerate(earlier) if each.waypoint is not None]
    for at, number in sorted(places, reverse=True):
        if at and earlier[number].leads_to(messages):
            return earlier[number]
    return None
