"""Arguments as rules of a grammar, in each of the ways in which families write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from penstock.errors import InvalidRequest
from penstock.grammar.recipe import MAX_TEXT, Part
from penstock.grammar.schema import place
from penstock.grammar.text import literal

_QUOTE = '<|"|>'
_SHARED = ("$defs", "definitions")
_MAX_DEEP = 10
_MAX_SHARED = 500
"""Definitions of one function that are referred to."""
_MAX_RULES = 5_000
"""Of all functions together."""
_PYTHON_NAME = re.compile(r"[\w+.-]{1,63}")
_GEMMA_NAME = re.compile(r"[^\s:,{}\[\]<\"\\]+")
"""What is read again as it was written."""
_NOTES = ("title", "description", "default", "examples", "$schema", "$id", "$comment", "format")
_FOLLOWED = {"type", "properties", "required", "items", "enum", "const", "additionalProperties", *_SHARED, *_NOTES}
_RULES = {
    "string": "gemma_string", "integer": "GEMMA_INTEGER", "number": "GEMMA_NUMBER", "boolean": "GEMMA_BOOLEAN",
    "null": '"null"', "object": "gemma_object", "array": "gemma_list",
}  # fmt: skip


class Values:
    """Rules for JSON objects: the schema is compiled as a part of its own."""

    def __init__(self, text: Callable[[str], str]) -> None:
        """`text` writes a text as a part of a rule."""
        self._text = text
        self.parts: dict[str, Part] = {}
        """What the rules refer to, by name."""
        self.lines: list[str] = []
        """The rules."""

    def rule(self, name: str, schema: Mapping[str, Any], at: str, *, any_object: bool = False) -> str:
        """Adds a rule of this name for the arguments of one function, and returns how to refer to it."""
        part = Part("object", "", at) if any_object else Part.schema(_as_object(schema), at)
        self.parts[name + "v"] = part
        self.lines.append(f"{name}: @{name}v")
        return name


class PythonValues(Values):
    """Keyword arguments without their parentheses; the values are JSON."""

    def rule(self, name: str, schema: Mapping[str, Any], at: str, *, any_object: bool = False) -> str:
        """See `Values`."""
        members = schema.get("properties")
        if any_object or not isinstance(members, Mapping) or not members:
            self.parts["any"] = Part.schema(True, at)
            member = "KEYWORD @any"
            self.lines += [f'{name}: ({member} (", " {member})*)?', "KEYWORD: /[a-zA-Z_][a-zA-Z0-9_]*=/"]
            self.lines = list(dict.fromkeys(self.lines))
            return name
        shared = {key: schema[key] for key in _SHARED if key in schema}
        each, size, written, required = len(json.dumps(shared)), 0, [], _required(schema)
        for number, (key, value) in enumerate(members.items()):
            own = value
            if isinstance(value, Mapping) and '"$ref"' in json.dumps(value):
                own, size = shared | dict(value), size + each
            if size > MAX_TEXT:
                what = f"{at}: with what its properties refer to it must have at most {MAX_TEXT} characters"
                raise InvalidRequest(what, field=at, code="schema_too_large")
            _check_name(key, _PYTHON_NAME, place(at, "properties"))
            self.parts[f"{name}v{number}"] = Part.schema(own, place(place(at, "properties"), key))
            written.append((f"{literal(key + '=')} @{name}v{number}", key in required))
        self.lines += [f"{name}: {name}m0", *_members(f"{name}m", written, ", ")]
        return name


class GemmaValues(Values):
    """Objects with bare keys, whose texts stand between tokens. What a schema says of types, properties and values is
    followed; strict tools that say more are refused."""

    def rule(self, name: str, schema: Mapping[str, Any], at: str, *, any_object: bool = False) -> str:
        """See `Values`."""
        if not self.lines:
            self.lines += self._common()
        self._shared = {} if any_object else dict(_definitions(schema, at))
        self._rule_of: dict[str, str] = {}
        self._asked: list[str] = []
        """What was referred to, in the order in which that was found."""
        self._name = name
        self.lines.append(
            f"{name}: " + ("gemma_object" if any_object else self._object(name, _as_object(schema), at, 0))
        )
        for ref in self._asked:  # which may ask for more
            value, where = self._shared[ref]
            self.lines.append(f"{self._rule_of[ref]}: {self._value(self._rule_of[ref], value, where, 0)}")
        self._check_ends()
        return name

    def _common(self) -> list[str]:
        quote, text = self._text(_QUOTE), r"""/(.|\n)*/ & ~/(.|\n)*<\|"\|>(.|\n)*/"""
        string = ["gemma_string: GEMMA_TEXT", f"GEMMA_TEXT: {quote} ({text}) {quote}"]
        if quote != literal(_QUOTE):  # a token, which is no part of a terminal
            string = [f"gemma_string: {quote} GEMMA_TEXT {quote}", f"GEMMA_TEXT: {text}"]
        return [
            *string,
            "GEMMA_INTEGER: /-?(0|[1-9][0-9]*)/",
            r"GEMMA_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
            'GEMMA_BOOLEAN: "true" | "false"',
            "GEMMA_KEY: /[a-zA-Z_][a-zA-Z0-9_]*:/",
            'gemma_value: gemma_string | GEMMA_NUMBER | GEMMA_BOOLEAN | "null" | gemma_object | gemma_list',
            'gemma_object: "{" (GEMMA_KEY gemma_value ("," GEMMA_KEY gemma_value)*)? "}"',
            'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
        ]

    def _value(self, name: str, schema: object, at: str, deep: int) -> str:
        if isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str) and ref in self._shared:
            return self._referred(ref)
        if not isinstance(schema, Mapping) or deep > _MAX_DEEP:
            return "gemma_value"
        for keyword in schema:
            if keyword not in _FOLLOWED:
                where = place(at, keyword)
                what = f"{where}: is not supported in the tool calls of this model"
                raise InvalidRequest(what, field=where, code="unsupported_keyword")
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if options is not None:
            if not isinstance(options, list):
                raise _invalid(place(at, "enum"), "must be a list")
            return "(" + " | ".join(self._literal(option) for option in options) + ")"
        kinds = schema.get("type")
        if isinstance(kinds, list):
            each = dict.fromkeys(map(str, kinds))
            return "(" + " | ".join(self._kind(name, kind, schema, (at, deep)) for kind in each) + ")"
        return self._kind(name, kinds, schema, (at, deep))

    def _referred(self, ref: str) -> str:
        """The rule of what is shared."""
        if ref not in self._rule_of:
            where = self._shared[ref][1]
            if len(self._asked) >= _MAX_SHARED:
                what = f"{where}: is one of more than {_MAX_SHARED} definitions that are referred to"
                raise InvalidRequest(what, field=where, code="schema_too_complex")
            self._rule_of[ref] = f"{self._name}d{len(self._asked)}"
            self._asked.append(ref)
        return self._rule_of[ref]

    def _check_ends(self) -> None:
        """Raises InvalidRequest for what demands itself again and again: a model would write it for ever."""
        left, ending = self._asked[::-1], set[str]()
        while True:
            for ref in left:
                if _ends(self._shared[ref][0], ending, 0):
                    ending.add(ref)
            before, left = left, [ref for ref in left if ref not in ending]
            if len(left) == len(before):
                break
        if left:
            raise _invalid(self._shared[left[-1]][1], "has no end: each of its values has to hold another one")

    def _kind(self, name: str, kind: object, schema: Mapping[str, Any], where: tuple[str, int]) -> str:
        at, deep = where
        if kind == "object" and schema.get("properties"):
            return self._object(name, schema, at, deep)
        if kind == "array" and "items" in schema:
            item = self._value(name + "i", schema["items"], place(at, "items"), deep + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        return _RULES.get(str(kind), "gemma_value")

    def _object(self, name: str, schema: Mapping[str, Any], at: str, deep: int) -> str:
        members = schema.get("properties") or {}
        if not isinstance(members, Mapping):
            raise _invalid(place(at, "properties"), "must be an object")
        if not members:
            return "gemma_object"
        written, required = [], _required(schema)
        for number, key in enumerate(sorted(members)):  # as the template prints them
            inside = place(place(at, "properties"), key)
            _check_name(key, _GEMMA_NAME, place(at, "properties"))
            value = self._value(f"{name}p{number}", members[key], inside, deep + 1)
            written.append((f"{literal(key + ':')} {value}", key in required))
        self.lines += _members(f"{name}m", written, ",")
        if len(self.lines) > _MAX_RULES:
            what = f"{at}: makes more than {_MAX_RULES} rules, with the functions before it"
            raise InvalidRequest(what, field=at, code="schema_too_complex")
        return f'"{{" {name}m0 "}}"'

    def _literal(self, value: object) -> str:
        return self._text(f"{_QUOTE}{value}{_QUOTE}") if isinstance(value, str) else literal(json.dumps(value))


def values_of(kind: Literal["json", "python", "gemma"], text: Callable[[str], str]) -> Values:
    """The rules for arguments that are written in that way."""
    return {"json": Values, "python": PythonValues, "gemma": GemmaValues}[kind](text)


def _definitions(schema: Mapping[str, Any], at: str) -> Iterator[tuple[str, tuple[object, str]]]:
    """What a schema shares, by how it is referred to, and where that is."""
    for kind in _SHARED:
        where = place(at, kind)
        shared = schema.get(kind, {})
        if not isinstance(shared, Mapping):
            raise _invalid(where, "must be an object")
        for key, value in shared.items():
            yield f"#/{kind}/{key}", (value, place(where, key))


def _ends(schema: object, ending: Collection[str], deep: int) -> bool:
    """Whether a value can end, given that these references can."""
    if not isinstance(schema, Mapping) or deep > _MAX_DEEP:
        return True
    if isinstance(ref := schema.get("$ref"), str):
        return ref in ending
    kinds, members = schema.get("type"), schema.get("properties")
    if "const" in schema or "enum" in schema or not isinstance(members, Mapping):
        return True
    if any(kind != "object" for kind in (kinds if isinstance(kinds, list) else [kinds])):
        return True
    return all(_ends(members[key], ending, deep + 1) for key in _required(schema) if key in members)


def _check_name(key: str, readable: re.Pattern[str], at: str) -> None:
    if not readable.fullmatch(key):
        what = f"{at}: {key[:64]!r} can't be written in the tool calls of this model, which have names without quotes"
        raise InvalidRequest(what, field=at, code="unsupported_name")


def _invalid(at: str, right: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: {right}", field=at, code="invalid_schema")


def _as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, also where a schema leaves that open."""
    return schema if {"type", "$ref", "anyOf", "oneOf", "allOf"} & set(schema) else {**schema, "type": "object"}


def _required(schema: Mapping[str, Any]) -> Collection[str]:
    required = schema.get("required")
    return {key for key in required if isinstance(key, str)} if isinstance(required, list) else ()


def _members(name: str, written: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Rules for members in order, of which those that aren't required may be left out. `{name}0` is the first rule."""
    lines = []
    for number, (member, required) in enumerate(written):
        last = number == len(written) - 1
        first, later = f"{name}{number}", f"{name}x{number}"
        goes_on = "" if last else f" {name}x{number + 1}"
        skip = "" if required else (' | ""' if last else f" | {name}{number + 1}")
        skip_later = "" if required else (' | ""' if last else f" | {name}x{number + 1}")
        lines.append(f"{first}: {member}{goes_on}{skip}")
        lines.append(f"{later}: {literal(comma)} {member}{goes_on}{skip_later}")
    return lines
