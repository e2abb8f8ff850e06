"""What the clients of a soak ask: different requests, drawn by a seed. Each of them has one right answer, because it
names the seed of its own samples."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MODEL = "penstock-mini"
TURNS = 3
"""Of a session."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_KINDS = {"chat": 5, "text": 3, "schema": 1, "tool": 1, "several": 1, "session": 2}
"""Of every 13 requests."""
_SHORT, _LONG, _LONGER = (8, 64), (200, 400), 0.08
"""Tokens of answers, and the share of the longer ones, in the middle of which somebody is likely to die."""
_THINGS = (
    "the sea",
    "a whale",
    "the weather in Oslo",
    "an old ship",
    "a letter to Ann",
    "two and two",
    "the night watch",
)
_ASKED = ("Tell me of {}.", "Write a line about {}.", "What do you know of {}?", "Say something of {}, briefly.")
_FOLLOWING = ("And then?", "Say that in other words.", "Why is that so?", "What else?")
_SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1, "maximum": 999},
        "kind": {"enum": ["ship", "port", "sea"]},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
    },
    "required": ["n", "kind", "words"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Looks.", "parameters": _WEATHER}}


@dataclass(frozen=True, slots=True)
class SoakAsk:
    """One request, but for who sends it and whether as a stream."""

    name: str
    """For people, and unique."""
    path: str
    body: Mapping[str, Any]
    session: str = ""
    """Those of one session have the same; empty: it has none."""
    turn: int = 1
    choices: int = 1


def drawn(seed: int, count: int) -> list[SoakAsk]:
    """Different requests; of sessions the first turns."""
    return [_drawn(random.Random(f"ask {seed} {number}"), number) for number in range(count)]


def next_turn(ask: SoakAsk, said: str) -> SoakAsk | None:
    """What comes in the session after that answer; None: nothing."""
    if not ask.session or ask.turn == TURNS:
        return None
    source = random.Random(f"{ask.name} {said}")
    messages = [
        *ask.body["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": source.choice(_FOLLOWING)},
    ]
    turn = ask.turn + 1
    return replace(ask, name=f"{ask.session}, turn {turn}", body={**ask.body, "messages": messages}, turn=turn)


def _drawn(source: random.Random, number: int) -> SoakAsk:
    kind = source.choices(list(_KINDS), list(_KINDS.values()))[0]
    name = f"{kind} {number}"
    tokens = source.randint(*(_LONG if source.random() < _LONGER else _SHORT))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "seed": source.randrange(1 << 31)}
    body["temperature"] = source.choice((0.0, 0.7, 1.0))
    if source.random() < 0.7:
        body["ignore_eos"] = True
    told = " ".join(source.choices(_THINGS, k=source.randrange(40)))
    asked = f"{number}: {told}. {source.choice(_ASKED).format(source.choice(_THINGS))}"
    if kind == "text":
        return SoakAsk(name, TEXT, {**body, "prompt": asked})
    body["messages"] = [{"role": "user", "content": asked}]
    if kind == "schema":
        schema = {"name": "thing", "schema": _SCHEMA, "strict": True}
        more = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 120}
        return SoakAsk(name, CHAT, {**body, **more, "ignore_eos": False})
    if kind == "tool":
        more = {"tools": [_TOOL], "tool_choice": source.choice(("auto", "required")), "max_tokens": 120}
        return SoakAsk(name, CHAT, {**body, **more, "ignore_eos": False})
    if kind == "several":
        return SoakAsk(name, CHAT, {**body, "n": 2}, choices=2)
    return SoakAsk(name, CHAT, body, session=name if kind == "session" else "")
