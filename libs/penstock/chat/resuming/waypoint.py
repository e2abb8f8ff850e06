"""Where a rendering can be resumed, as plain values: they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waypoint:
    """A place between two messages in the rendering of a conversation."""

    chars: int
    """Characters of the text up to here."""
    at: int
    """The message that comes next; one before it stays as it was rendered."""
    through: int
    """Leading messages on which the text up to here depends: the longer conversation must have the same."""
    state: str
    """What the template's variables were, for `WatchedRun`."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The end of a prompt's text."""

    text: str
    waypoint: Waypoint | None = None
    """Where a longer conversation can be resumed; its `chars` count from the beginning of the whole text."""
