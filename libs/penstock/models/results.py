"""Tool results as clients send them: JSON in any spacing, in other objects, among other fields, or plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from .values import KINDS, spoken, value
from .words import Side

_STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"spaced": {}, "compact": {"separators": (",", ":")}, "indented": {"indent": 2}, "wide": {"indent": 4}}
)


def written(rng: Random, content: Any) -> str:
    """`content` as JSON: half of the time with spaces, else compact or indented."""
    style = rng.choices(tuple(_STYLES), (10, 6, 3, 1))[0]
    return json.dumps(content, ensure_ascii=False, **_STYLES[style])


def compact(rng: Random, arguments: str) -> str:
    """The arguments of a call as a client sends them back that has read them: compact or, now and then, indented."""
    style = rng.choices(("compact", "indented"), (4, 1))[0]
    return json.dumps(json.loads(arguments), ensure_ascii=False, **_STYLES[style])


def shown(rng: Random, side: Side, result: Mapping[str, Any]) -> str:
    """A result, in one of the shapes in which it may come."""
    draw = rng.random()
    if draw < 0.6:
        return written(rng, result)
    if draw < 0.75:
        return written(rng, _wrapped(rng, result))
    if draw < 0.87:
        return _plain(rng, result)
    return written(rng, _among_others(rng, side, result))


def failed(rng: Random, error: str) -> str:
    """An error as tools, servers and frameworks report it."""
    code = rng.choice((400, 403, 404, 408, 409, 429, 500, 503))
    shapes: tuple[Any, ...] = (
        {"error": error},
        {"error": error},
        {"error": {"message": error, "code": code}},
        {"status": "error", "message": error},
        {"ok": False, "error": error},
        {"isError": True, "content": [{"type": "text", "text": error}]},
        f"Error: {error}",
        f"Tool failed: {error}",
    )
    shape = rng.choice(shapes)
    return shape if isinstance(shape, str) else written(rng, shape)


def _wrapped(rng: Random, result: Mapping[str, Any]) -> Any:
    """The result within the object or list that a service puts round it."""
    shapes: tuple[Any, ...] = (
        {"result": result},
        {"status": "ok", "data": result},
        {"success": True, "result": result},
        {"code": 200, "body": {"data": result}},
        [result],
        {"count": 1, "items": [result]},
        {"content": [{"type": "text", "text": _plain(rng, result)}]},
        list(result.values()),
    )
    return rng.choice(shapes)


def _plain(rng: Random, result: Mapping[str, Any]) -> str:
    """The result as text: a line or a clause for each field, or one value alone."""
    if len(result) == 1 and rng.random() < 0.6:
        return spoken(next(iter(result.values())))
    form, between = rng.choice(
        (("{k}: {v}", "\n"), ("{k}: {v}", ", "), ("{k} = {v}", "\n"), ("{k} is {v}", ", "), ("- {k}: {v}", "\n"))
    )
    return between.join(form.format(k=key.replace("_", " "), v=spoken(item)) for key, item in result.items())


def _among_others(rng: Random, side: Side, result: Mapping[str, Any]) -> dict[str, Any]:
    """The result's fields among others that nobody asked for: some, or very many."""
    count = rng.randint(1, 4) if rng.random() < 0.8 else rng.randint(8, 24)
    fields = list(result.items())
    taken = {*result}
    while count > 0:
        key = side.noun(rng)
        if key not in taken:
            taken.add(key)
            fields.insert(rng.randint(0, len(fields)), (key, _other(rng, side)))
            count -= 1
    return dict(fields)


def _other(rng: Random, side: Side) -> Any:
    """A value of a field that nobody asked for; some hold lists, objects or nothing."""
    draw = rng.random()
    if draw < 0.1:
        return None
    if draw < 0.2:
        return [value(rng, side, "word") for _ in range(rng.randint(0, 3))]
    if draw < 0.3:
        return {side.noun(rng): value(rng, side, rng.choice(KINDS))}
    return value(rng, side, rng.choice(KINDS))
