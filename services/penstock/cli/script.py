"""What the demo says: the system text, the tools, what they return, and the user's turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Script:
    """One session."""

    system: str
    tools: Sequence[Mapping[str, Any]]
    """In OpenAI's form."""
    answer: Callable[[str, str], str]
    """A tool's name and arguments, as the API gives them, to its result; a wrong call has a result that says so."""
    turns: Sequence[str]
    """What the user says, one after the other."""


def demo_script() -> Script:
    """The session that the embedded model was made for."""
    from penstock.models import demo_session

    return Script(demo_session.SYSTEM, demo_session.TOOLS, demo_session.answer, demo_session.TURNS)
