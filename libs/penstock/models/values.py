"""Random values of every kind that a parameter or a result field may hold."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from .words import CITIES, Side

JSON_TYPES: Mapping[str, str] = MappingProxyType({"int": "integer", "number": "number", "bool": "boolean"})
KINDS = ("name", "name", "word", "id", "id", "int", "int", "number", "date", "time", "email", "file", "phrase", "bool")
_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
_STATES = ("shipped", "delivered", "pending", "paid", "open", "closed", "active", "paused", "failed", "ready")
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek", "Turkish", "Danish", "Japanese")
_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD", "AUD", "INR")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "today", "tomorrow")
_LISTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "condition": _CONDITIONS,
        "state": _STATES,
        "language": _LANGUAGES,
        "currency": _CURRENCIES,
        "day": _DAYS,
        "city": CITIES,
        "priority": ("low", "normal", "high", "urgent"),
        "room": ("kitchen", "bedroom", "office", "hall", "bathroom", "garage", "garden", "cellar", "studio"),
        "unit": ("celsius", "fahrenheit"),
    }
)


def value(rng: Random, side: Side, kind: str) -> Any:
    """A random JSON value of `kind`: a name of `_LISTS`, one of `KINDS`, or `int:LOW:HIGH`."""
    if kind in _LISTS:
        return rng.choice(_LISTS[kind])
    if kind.startswith("int"):
        low, high = (int(x) for x in kind.split(":")[1:]) if ":" in kind else (1, rng.choice((9, 99, 999, 9999)))
        return rng.randint(low, high)
    match kind:
        case "name":
            return side.proper(rng)
        case "fullname":
            return f"{side.proper(rng)} {side.pseudo(rng).capitalize()}"
        case "word":
            return side.noun(rng)
        case "id":
            return _identifier(rng, side)
        case "number":
            return rng.randint(1, 9999) / rng.choice((10, 100))
        case "date":
            return f"{rng.randint(2019, 2031)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        case "time":
            return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
        case "email":
            return f"{side.proper(rng).lower()}@{side.pseudo(rng)}.{rng.choice(('com', 'org', 'net', 'io'))}"
        case "file":
            folder = rng.choice(("", "", f"{side.noun(rng)}/", f"/{side.noun(rng)}/"))
            return f"{folder}{side.noun(rng)}.{rng.choice(('txt', 'csv', 'md', 'pdf', 'json', 'py', 'log'))}"
        case "phrase":
            return " ".join(_word(rng, side) for _ in range(rng.choice((2, 2, 3))))
        case "symbol":
            return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((3, 4))))
        case "bool":
            return rng.random() < 0.5
    raise ValueError(f"no value kind {kind!r}")


def spoken(item: Any) -> str:
    """How a value is written in a sentence: strings bare, everything else as JSON would."""
    if isinstance(item, bool):
        return "true" if item else "false"
    return str(item)


def schema(kind: str) -> dict[str, Any]:
    """The JSON schema of `kind`, without a description."""
    if kind in ("priority", "unit"):
        return {"type": "string", "enum": list(_LISTS[kind])}
    return {"type": JSON_TYPES.get(kind.split(":")[0], "string")}


def _word(rng: Random, side: Side) -> str:
    return rng.choice(side.adjectives) if rng.random() < 0.4 else side.noun(rng)


def _identifier(rng: Random, side: Side) -> str:
    number = rng.randint(10, 99999)
    match rng.randrange(4):
        case 0:
            return f"{rng.choice('ABCDEFGHKLMNPRSTVWXZ')}-{number}"
        case 1:
            return f"{side.pseudo(rng, 1)[:3]}-{number}"
        case 2:
            return f"{rng.choice('ABCDEFGHKLMNPRSTVWXZ')}{rng.choice('ABCDEFGHKLMNPRSTVWXZ')}{number}"
        case _:
            return str(number)
