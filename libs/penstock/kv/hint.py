"""A hint about the return of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReturnHint:
    """A session has ended, or is expected back. Without `ended` and `returns_at` nothing is known."""

    ended: bool = False
    returns_at: float | None = None
    """When its next turn is expected, in seconds of the holder's clock; the gateway's begins with the answer's end."""
