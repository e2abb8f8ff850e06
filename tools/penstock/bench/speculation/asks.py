"""What clients ask: tool calls, JSON to a schema, text that quotes, free text, and text that nobody could guess."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.models.demo_session import SYSTEM, TOOLS

_PLACES = ("Bergen", "Lisbon", "Oslo", "Vienna", "Porto", "Ghent", "Turin", "Graz")
_NAMES = ("Nora Lind", "Victor Amado", "Ida Holm", "Paul Berg", "Rosa Klein", "Jan Moe", "Lena Falk", "Tom Reyes")
_ON = {"extra_body": {"ignore_eos": True}}
"""The answer goes on to its limit."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 24},
        "order": {
            "type": "object",
            "properties": {
                "reference": {"type": "string", "pattern": "^[A-Z]-[0-9]{4}$"},
                "status": {"enum": ["shipped", "delivered", "cancelled"]},
                "express": {"type": "boolean"},
            },
            "required": ["reference", "status", "express"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 3,
            "maxItems": 3,
        },
        "needs_follow_up": {"type": "boolean"},
    },
    "required": ["customer", "order", "items", "needs_follow_up"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Asks:
    """A workload."""

    name: str
    bodies: Sequence[Mapping[str, Any]]
    """Of chat completions."""


def _chat(text: str, seed: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "seed": seed, **fields}


def tool_calls(count: int, seed: int) -> Asks:
    """One call each, of one of the demo's tools."""
    draw = random.Random(f"tools {seed}")
    texts = [
        f"What is the weather in {draw.choice(_PLACES)}?"
        if number % 2
        else f"Create an event called review {draw.randrange(100)} on 2026-12-{draw.randrange(10, 28)} at 14:00."
        for number in range(count)
    ]
    return Asks("tool_calls", [_chat(text, seed, tools=TOOLS, tool_choice="required") for text in texts])


def schema_json(count: int, seed: int) -> Asks:
    """Objects of one schema."""
    draw = random.Random(f"json {seed}")
    form = {"type": "json_schema", "json_schema": {"name": "record", "schema": _SCHEMA, "strict": True}}
    texts = [f"Record the order C-{draw.randrange(1000, 9999)} of {draw.choice(_NAMES)} as JSON." for _ in range(count)]
    return Asks("schema_json", [_chat(text, seed, response_format=form) for text in texts])


def quotes(count: int, seed: int) -> Asks:
    """The last of several answers that say what a tool has returned."""
    draw = random.Random(f"quotes {seed}")
    bodies = []
    for _ in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for number, place in enumerate(draw.sample(_PLACES, 6)):
            messages += _weather(place, f"call_{number}", draw)
        bodies.append({**_chat("", seed), "messages": messages[:-1], "tools": TOOLS, "max_tokens": 96, **_ON})
    return Asks("quotes", bodies)


def _weather(place: str, id: str, draw: random.Random) -> list[dict[str, Any]]:
    """A question, a call, its result, and an answer."""
    degrees, sky = draw.randrange(-9, 30), draw.choice(("rainy", "sunny", "snowy", "cloudy"))
    function = {"name": "get_weather", "arguments": json.dumps({"city": place})}
    return [
        {"role": "user", "content": f"What is the weather in {place}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": id, "content": json.dumps({"temperature": degrees, "condition": sky})},
        {"role": "assistant", "content": f"The weather in {place} is {sky} and the temperature is {degrees} degrees."},
    ]


def free_text(count: int, seed: int) -> Asks:
    """Whatever the model says."""
    draw = random.Random(f"text {seed}")
    texts = [f"Tell me about {draw.choice(_PLACES)} and {draw.choice(_NAMES)}." for _ in range(count)]
    return Asks("text", [_chat(text, seed, max_tokens=128, **_ON) for text in texts])


def hostile(count: int, seed: int) -> Asks:
    """Tokens drawn nearly evenly from all: whatever is drafted is wrong. Noise decides nearly alone, so each has its
    own."""
    bodies = [_chat(f"Go on {number}.", 1000 * seed + number, max_tokens=128) for number in range(count)]
    return Asks("hostile", [{**body, "temperature": 2.0, **_ON} for body in bodies])
