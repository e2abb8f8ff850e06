"""oneOf whose options can't match together means anyOf, which the compiler can follow.

The compiler sees that too, but not through references, which is how unions with a tag are usually written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MOST = 64
"""Options that are compared with each other."""
_DEEP = 8
"""References that are followed in a row."""


def exclusive(schema: Json) -> Json:
    """The schema, as `read_schema` makes it, with anyOf in place of every such oneOf."""
    definitions = schema.get("$defs", {})
    return {key: _walk(value, definitions) for key, value in _either(schema, definitions).items()}


def _walk(value: Any, definitions: Json) -> Any:
    if isinstance(value, list):
        return [_walk(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    found = _either(value, definitions)
    return {key: item if key in ("enum", "const") else _walk(item, definitions) for key, item in found.items()}


def _either(schema: Json, definitions: Json) -> Json:
    options = schema.get("oneOf")
    if not isinstance(options, list) or "anyOf" in schema or len(options) > _MOST:
        return schema
    seen = [_resolved(option, definitions) for option in options]
    tags = schema.get("required", [])
    if not all(_apart(one, other, definitions, tags) for at, one in enumerate(seen) for other in seen[:at]):
        return schema
    return {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}


def _resolved(schema: Any, definitions: Json) -> Any:
    for _ in range(_DEEP):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = definitions.get(schema["$ref"].rpartition("/")[2], True)
    return schema


def _apart(one: Any, other: Any, definitions: Json, required: Sequence[str]) -> bool:
    """Whether it is certain that no value matches both, given members that every value has."""
    if one is False or other is False:
        return True
    if one is True or other is True:
        return False
    mine, theirs = _types(one), _types(other)
    if not mine & theirs:
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    if mine & theirs != {"object"}:
        return False
    names = {*required, *one.get("required", ()), *other.get("required", ())}
    return any(_tags_differ(one, other, name, definitions) for name in names)


def _tags_differ(one: Json, other: Json, name: str, definitions: Json) -> bool:
    tags = [_resolved(schema.get("properties", {}).get(name, True), definitions) for schema in (one, other)]
    values = [_values(tag) if isinstance(tag, dict) else None for tag in tags]
    return values[0] is not None and values[1] is not None and not values[0] & values[1]


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type", _TYPES)
    found = {given} if isinstance(given, str) else set(given)
    return found | ({"integer"} if "number" in found else set())


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema allows, as texts; None when it isn't certain."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    simple = given is not None and all(value is None or isinstance(value, str | int) for value in given)
    return {json.dumps(value) for value in given} if given is not None and simple else None
