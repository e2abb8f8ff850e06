"""Events that are alike but for a text: what surrounds it is encoded once for a stream."""

from __future__ import annotations

HOLE = "\ue000\ue001"
"""Stands in an event where a value will stand; no id and no model's name has these characters."""
_WRITTEN = f'"{HOLE}"'.encode()


def template(event: bytes) -> bytes:
    """A written event with holes, as a format: `template(event) % encode(text)`, with a tuple where it has several."""
    return event.replace(b"%", b"%%").replace(_WRITTEN, b"%b")
