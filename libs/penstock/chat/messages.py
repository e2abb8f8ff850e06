"""A conversation as plain values, which both doors of the gateway make from a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the assistant made; `arguments` is JSON text, as generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PictureLink:
    """A picture, as a client sends it."""

    url: str
    """A data: URL."""
    at: str
    """Where it stands in the request, for errors."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `role` is system, user, assistant or tool."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    """Role tool: the call that this answers."""
    name: str = ""
    reasoning: str = ""
    parts: tuple[str | PictureLink, ...] = ()
    """Texts and pictures, of a message that has any; `content` is its texts then."""

    @property
    def pictures(self) -> tuple[PictureLink, ...]:
        """In order."""
        return tuple(part for part in self.parts if isinstance(part, PictureLink))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema."""
    strict: bool = False
    """Whether a schema that cannot be followed is an error."""
    at: str = "tools"
    """Where the schema stands in the request, for errors."""

    def as_json(self) -> dict[str, Any]:
        """OpenAI's form, which templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a chat template that the client sets."""

    name: str
    value: Any
    """JSON."""
    at: str
    """Where it stands in the request, for errors."""
    wish: bool = False
    """Whether a template need not read it."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How messages become a prompt."""

    generate: bool = True
    """Whether the template opens an answer behind the last message."""
    continued: bool = False
    """Whether the prompt ends with the text of the last message, which the answer continues."""
    variables: tuple[Variable, ...] = ()


PLAIN = Rendering()
"""The template opens an answer, and nothing else is asked of it."""
