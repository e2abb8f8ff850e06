"""What a tool is to the generator: its specification, and the requests that it serves.

Two sorts are made: everyday tools under one of their many names (`everyday`), and made-up ones (`invented`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .render import MARK_CLOSE, MARK_OPEN
from .values import schema, spoken


@dataclass(frozen=True)
class Parameter:
    """A parameter: its key, how people call it, the kind of its values."""

    key: str
    words: str
    kind: str
    optional: bool = False
    description: str = ""


@dataclass(frozen=True)
class ToolRequest:
    """A request, the one right call for it, the result of that call and the answer to give."""

    text: str
    name: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any]
    answer: str
    clause: str  # the request as a clause, to be joined with another
    missing: tuple[str, str, str] | None = None  # request without a value, question, reply


@dataclass(frozen=True)
class TrainingTool:
    """A tool that can be asked for; `ask` makes a request, `follow` a short one after an earlier request."""

    spec: Mapping[str, Any]
    subject: str  # what it is about: two tools of one subject would be ambiguous
    ask: Callable[[Random], ToolRequest]
    follow: Callable[[Random, ToolRequest], ToolRequest | None]
    produces: tuple[str, str] | None = None  # a result field and its kind, for chains
    accepts: Callable[[Random, str, Any], ToolRequest | None] = field(default=lambda rng, words, item: None)


def mark(item: Any) -> str:
    """A value in an answer, marked as such."""
    return f"{MARK_OPEN}{spoken(item)}{MARK_CLOSE}"


def specification(name: str, description: str, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The OpenAI description of a tool."""
    properties = {}
    for p in parameters:
        properties[p.key] = schema(p.kind) | ({"description": p.description} if p.description else {})
    required = [p.key for p in parameters if not p.optional]
    function: dict[str, Any] = {
        "name": name,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def tool_name(rng: Random, words: Sequence[str]) -> str:
    """`words` joined in one of the usual styles."""
    style = rng.random()
    if style < 0.65:
        return "_".join(words)
    if style < 0.85:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    return "-".join(words)
