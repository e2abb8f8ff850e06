"""Blocks as policies see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Item:
    key: bytes
    first_token: int = 0
    used: int = 0
    uses: int = 0
    used_at: float = 0.0
    turn: int = 0
    seconds: float = 0.0
    session: str = ""
    note: Any = None


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")
