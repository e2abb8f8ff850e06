"""The process that renders: `python -m penstock.chat.rendering`, asked by `processes`."""

from __future__ import annotations

import json
from dataclasses import asdict

from penstock.chat.resuming.waypoint import Waypoint
from penstock.chat.template import ChatTemplate
from penstock.errors import InvalidRequest
from penstock.runtime.apart.serving import Answer, Works, serve_apart

_MEMORY = 2 << 30
"""Bytes; what a template makes beyond them is a MemoryError."""


def _make(setup: bytearray) -> tuple[Works, float]:
    settings = json.loads(setup)
    template = ChatTemplate(settings["source"], settings["special_tokens"])
    template.compile()
    return lambda asked: _render(template, asked), settings["seconds"]


def _render(template: ChatTemplate, asked: bytearray) -> Answer:
    try:
        messages, tools, waypoint, generate, variables = json.loads(asked)
        place = None if waypoint is None else Waypoint(**waypoint)
        rest = template.resume(messages, tools, place, generate=generate, variables=variables)
        if rest is None:
            return "nothing", b""
        following = None if rest.waypoint is None else asdict(rest.waypoint)
        return "answer", json.dumps(following).encode() + b"\n" + rest.text.encode(errors="replace")
    except (RecursionError, MemoryError):
        raise InvalidRequest("the chat template cannot render these") from None


if __name__ == "__main__":
    serve_apart(_make, memory=_MEMORY)
