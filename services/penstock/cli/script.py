"""The script of the demo: the system text, the tools, their results, and the user's turns."""

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
    """A tool's name and arguments, as the API gives them, to its result; the result of a wrong call says so."""
    turns: Sequence[str]
    """The user's messages, in order."""


def demo_script() -> Script:
    """The session that the embedded model was made for."""
    from penstock.models import demo_session

    return Script(demo_session.SYSTEM, demo_session.TOOLS, demo_session.answer, demo_session.TURNS)
