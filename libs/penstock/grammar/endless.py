"""Whether a schema has a finite value: one that demands itself again and again would make a model write for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = {"null", "boolean", "integer", "number", "string"}


def has_end(schema: Mapping[str, Any]) -> bool:
    """False only when every value of the schema would have to contain itself. `schema` is as `read_schema` makes it."""
    definitions = schema.get("$defs", {})
    ending: set[str] = set()
    while True:
        more = {name for name, found in definitions.items() if name not in ending and _ends(found, ending)}
        if not more:
            return _ends(schema, ending)
        ending |= more


def _ends(schema: Mapping[str, Any] | bool, ending: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in ending:
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    if not all(any(_ends(part, ending) for part in schema[key]) for key in ("anyOf", "oneOf") if key in schema):
        return False
    if "const" in schema or "enum" in schema:
        return True
    given = schema.get("type", ("null",))
    types = {given} if isinstance(given, str) else set(given)
    return bool(
        types & _PLAIN
        or ("object" in types and _object(schema, ending))
        or ("array" in types and _array(schema, ending))
    )


def _object(schema: Mapping[str, Any], ending: set[str]) -> bool:
    known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    free = True if "patternProperties" in schema else other
    return all(_ends(known.get(name, free), ending) for name in schema.get("required", ()))


def _array(schema: Mapping[str, Any], ending: set[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    return all(_ends(item, ending) for item in first[:least]) and (
        least <= len(first) or _ends(schema.get("items", True), ending)
    )
