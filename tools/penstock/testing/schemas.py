"""JSON schemas and instances of them, from a seed, and their grammars with the separators that our templates print."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

Schema = Mapping[str, Any]

_WORDS = ("alpha", "beta", "gamma", "city", "name", "count", "unit", "price", "tag", "note", "status", "file", "limit")
_LETTERS = 'abc XYZ 019 -_.,:;!?äöß"\\/\n\t{}[]<>'
_DEEPEST = 3

HAND_WRITTEN: tuple[Schema, ...] = (
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
    {"const": "exactly this"},
    {"enum": ["red", "green", "blue", None, 3, True]},
    {"enum": ["a", "aa", "aaa", "aaab"]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": ["string", "null"], "maxLength": 5},
    {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 5}, {"type": "boolean"}, {"const": "none"}]},
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"enum": [1, 2, 3]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "type": "object",
        "properties": {
            "outer": {"type": "object", "properties": {"inner": {"type": "array", "items": {"const": "x"}}}}
        },
        "required": ["outer"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
        "maxProperties": 3,
    },
    {
        "type": "array",
        "prefixItems": [{"enum": ["add", "sub"]}, {"type": "integer", "minimum": 0, "maximum": 100}],
        "items": False,
        "minItems": 2,
    },
)
"""Shapes that the generator doesn't make."""


def schema(seed: int) -> Schema:
    """A schema of bounded instances; the same for the same seed."""
    return _schema(random.Random(f"schema {seed}"), 0)


def instance(schema: Schema, seed: int) -> Any:
    """A value that a schema of `schema` allows; the same for the same seed."""
    return _instance(schema, random.Random(f"instance {seed}"))


def written(value: Any) -> str:
    """A value as JSON, with the separators of `grammar`."""
    return json.dumps(value, ensure_ascii=False)


def grammar(schema: Schema) -> str:
    """llguidance's JSON form of the grammar of a schema's instances."""
    text: str = LLMatcher.grammar_from_json_schema(
        dict(schema), overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    return text


def _schema(source: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "anyOf"]
    kinds += ["object", "object", "object", "array"] if depth < _DEEPEST else []
    kind = source.choice(kinds) if depth else source.choice(["object"] * 4 + ["array", "anyOf"])
    if kind == "string":
        shortest = source.randrange(3)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + source.randrange(1, 12)}
    if kind in ("integer", "number"):
        low = source.randrange(-100, 100)
        return {"type": kind, "minimum": low, "maximum": low + source.randrange(1, 1000)}
    if kind == "enum":
        return {"enum": source.sample([*_WORDS, "ä ö", 'quo"ted', 1, -2, 3.5, True, None], source.randrange(1, 6))}
    if kind == "const":
        return {"const": source.choice([*_WORDS, 7, False, None])}
    if kind == "anyOf":
        return {"anyOf": [_schema(source, depth + 1) for _ in range(source.randrange(2, 4))]}
    if kind == "array":
        least = source.randrange(2)
        most = least + source.randrange(1, 4)
        return {"type": "array", "items": _schema(source, depth + 1), "minItems": least, "maxItems": most}
    if kind == "object":
        names = source.sample(_WORDS, source.randrange(1, 5))
        return {
            "type": "object",
            "properties": {name: _schema(source, depth + 1) for name in names},
            "required": [name for name in names if source.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def _instance(schema: Schema, source: random.Random) -> Any:
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return source.choice(schema["enum"])
    if "anyOf" in schema:
        return _instance(source.choice(schema["anyOf"]), source)
    kind = schema["type"]
    if kind == "object":
        names = [name for name in schema["properties"] if name in schema["required"] or source.random() < 0.5]
        return {name: _instance(schema["properties"][name], source) for name in names}
    if kind == "array":
        count = source.randint(schema["minItems"], schema["maxItems"])
        return [_instance(schema["items"], source) for _ in range(count)]
    if kind == "string":
        return "".join(source.choices(_LETTERS, k=source.randint(schema["minLength"], schema["maxLength"])))
    if kind == "integer":
        return source.randint(schema["minimum"], schema["maximum"])
    if kind == "number":
        return round(source.uniform(schema["minimum"], schema["maximum"]), 2)
    return source.choice([True, False]) if kind == "boolean" else None
