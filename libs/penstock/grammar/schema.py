"""Checks a client's JSON Schema and brings it into the form that is compiled.

Whatever a schema says is followed or refused by name and place: `properties.a.not: is not supported`. What is compiled
holds no annotations, no references but to its own `$defs`, and the keywords of draft 2020-12; older drafts' are
translated where they mean the same. Bounds come before compiling, because the compiler itself has none that help.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from penstock.errors import InvalidRequest
from penstock.grammar.endless import has_end
from penstock.grammar.exclusive import exclusive
from penstock.grammar.keywords import (
    ANNOTATIONS,
    CHECKS,
    EXACT,
    FORMATS,
    HINTS,
    IN_LIST,
    IN_OBJECT,
    IN_VALUE,
    asks_for_nothing,
    unknown,
    whole,
)
from penstock.grammar.whitespace import whitespace_of_ecmascript

Json = dict[str, Any]

MAX_PROPERTIES = 5_000
MAX_OBJECTS_DEEP = 10
"""Objects inside of objects."""
MAX_DEEP = 64
"""Schemas inside of schemas, of any kind."""
MAX_CHARACTERS = 120_000
"""All names of properties, and all values of enum and const, together."""
MAX_VALUES = 1_000
"""All values of enum and const together."""
MAX_LONG_ENUM = 250, 15_000
"""An enum of more values than the first may have as many characters as the second."""
MAX_PATTERN_PROPERTIES = 64
MAX_PATTERN = 2_048
"""Characters of one pattern."""
MAX_OPTIONS = 1_000
"""All options of anyOf, oneOf and allOf together."""

_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")


def read_schema(schema: object, at: str, control: Collection[str] = ()) -> Json:
    """The schema to compile. Raises InvalidRequest naming the keyword and its place, which begins with `at`.

    `control` are the texts of the tokenizer's added tokens: a literal that holds one can't be written by a model.
    """
    reader = _Reader(schema, at, control)
    found = reader.read()
    if not has_end(found):
        raise InvalidRequest(f"{at}: no finite value can match it", field=at, code="invalid_schema")
    return exclusive(found)


def place(at: str, key: str | int) -> str:
    """The place of a member or of an item, as in JavaScript."""
    if isinstance(key, int):
        return f"{at}[{key}]"
    return f"{at}.{key[:80]}" if _NAME.fullmatch(key) else f"{at}[{json.dumps(key[:80])}]"


def check_literal(text: str, at: str, control: Collection[str]) -> None:
    """Raises InvalidRequest for a literal with a control token's text: the model would write the token instead."""
    for token in control:
        if token in text:
            what = f"{at}: must not contain {token!r}, which is a control token of this model"
            raise InvalidRequest(what, field=at, code="invalid_schema")


def check_pattern(pattern: str, at: str, control: Collection[str]) -> None:
    """Raises InvalidRequest for a regular expression that is too long or spells a control token."""
    if len(pattern) > MAX_PATTERN:
        what = f"{at}: must have at most {MAX_PATTERN} characters, not {len(pattern)}"
        raise InvalidRequest(what, field=at, code="invalid_schema")
    check_literal(re.sub(r"\\(.)", r"\1", pattern), at, control)


@dataclass(slots=True)
class _Reader:
    """One pass over a schema and over everything that it refers to."""

    root: object
    at: str
    control: Collection[str]
    definitions: Json = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """The name under `$defs` of each place that is referred to."""
    waiting: list[tuple[str, str, object]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def read(self) -> Json:
        found = self._schema(self.root, self.at, 0, 0)
        while self.waiting:
            name, at, schema = self.waiting.pop()
            self.definitions[name] = self._schema(schema, at, 0, 0)
        if found is False:
            raise self._bad(self.at, "no value can match it")
        whole_schema = {} if found is True else found
        assert isinstance(whole_schema, dict)
        return whole_schema | ({"$defs": self.definitions} if self.definitions else {})

    def _schema(self, schema: object, at: str, deep: int, objects: int) -> Json | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._bad(at, "must be a JSON Schema: an object, true or false")
        if deep > MAX_DEEP:
            raise self._bad(at, f"schemas are nested more than {MAX_DEEP} deep")
        objects += "properties" in schema or "patternProperties" in schema
        if objects > MAX_OBJECTS_DEEP:
            raise self._bad(at, f"objects are nested more than {MAX_OBJECTS_DEEP} deep")
        found: Json = {}
        if deep and "$id" in schema:
            raise self._bad(place(at, "$id"), "is not supported below the root")
        for keyword, value in self._by_pattern(_modern(schema), at).items():
            if not asks_for_nothing(keyword, value):
                self._keyword(found, keyword, value, (place(at, keyword), deep + 1, objects))
        tag = schema["discriminator"].get("propertyName") if isinstance(schema.get("discriminator"), Mapping) else None
        if isinstance(tag, str) and "oneOf" in found and tag not in found.get("required", ()):
            found["required"] = [*found.get("required", ()), tag]  # else there would be values that match several
        return found

    def _by_pattern(self, schema: Mapping[str, Any], at: str) -> Mapping[str, Any]:
        """A rule for the names of members as patternProperties, where nothing else is said of the members."""
        names = schema.get("propertyNames")
        if isinstance(names, Mapping) and isinstance(names.get("$ref"), str) and names["$ref"].startswith("#"):
            names, _ = self._target(unquote(names["$ref"][1:]), place(at, "propertyNames"))
        pattern = _name_pattern(names)
        if pattern is None or schema.keys() & {"properties", "patternProperties"}:
            return schema
        rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
        members = {pattern: schema.get("additionalProperties", True)}
        return rest | {"patternProperties": members, "additionalProperties": False}

    def _keyword(self, found: Json, keyword: str, value: Any, where: tuple[str, int, int]) -> None:
        at, deep, objects = where
        if keyword in IN_OBJECT:
            found[keyword] = self._named(keyword, value, where)
        elif keyword in IN_LIST:
            if not isinstance(value, list) or not value:
                raise self._bad(at, "must be a list with at least one schema")
            self._count(at, "options", len(value), MAX_OPTIONS)
            read = [self._schema(item, place(at, n), deep, objects) for n, item in enumerate(value)]
            found[keyword] = [*found.get(keyword, ()), *read]
        elif keyword in IN_VALUE:
            found[keyword] = self._schema(value, at, deep, objects)
        elif keyword in CHECKS:
            if what := CHECKS[keyword](value):
                raise self._bad(at, what)
            self._plain(found, keyword, value, at)
        elif what := unknown(keyword):
            raise self._bad(at, what, "unsupported_keyword")

    def _named(self, keyword: str, value: object, where: tuple[str, int, int]) -> Json:
        at, deep, objects = where
        if not isinstance(value, Mapping):
            raise self._bad(at, "must be an object of schemas")
        patterns = keyword == "patternProperties"
        self._count(at, keyword, len(value), MAX_PATTERN_PROPERTIES if patterns else MAX_PROPERTIES)
        for name in value:
            (check_pattern if patterns else check_literal)(name, place(at, name), self.control)
        self._count(at, "characters", sum(map(len, value)), MAX_CHARACTERS)
        read = {name: self._schema(item, place(at, name), deep, objects) for name, item in value.items()}
        return {whitespace_of_ecmascript(name): item for name, item in read.items()} if patterns else read

    def _plain(self, found: Json, keyword: str, value: Any, at: str) -> None:
        if keyword == "$ref":
            found["$ref"] = f"#/$defs/{self._refer(value, at)}"
            return
        if keyword in ("enum", "const"):
            self._literals(value if keyword == "enum" else [value], at)
        elif keyword == "required":
            self._count(at, "properties", len(value), MAX_PROPERTIES)
            for name in value:
                check_literal(name, at, self.control)
        elif keyword == "pattern":
            check_pattern(value, at, self.control)
            value = whitespace_of_ecmascript(value)
        elif keyword == "format":
            if value in HINTS or "string" not in found.get("type", "string"):
                return
            if value not in FORMATS:
                raise self._bad(at, f"{value[:40]!r} is not supported; there are {', '.join(FORMATS)}")
            if value in EXACT:
                found["allOf"] = [*found.get("allOf", ()), *({"pattern": pattern} for pattern in EXACT[value])]
        found[keyword] = whole(value)

    def _literals(self, values: list[object], at: str) -> None:
        self._count(at, "values", len(values), MAX_VALUES)
        size, most = len(json.dumps(values, ensure_ascii=False)), MAX_LONG_ENUM
        if len(values) > most[0] and size > most[1]:
            raise self._bad(at, f"more than {most[0]} values may have at most {most[1]} characters, not {size}")
        self._count(at, "characters", size, MAX_CHARACTERS)
        for text in _strings(values):
            check_literal(text, at, self.control)

    def _refer(self, reference: str, at: str) -> str:
        """The name, under `$defs`, of what is referred to; it is read later, once."""
        if reference in self.names:
            return self.names[reference]
        if not reference.startswith("#"):
            raise self._bad(at, f"{reference[:80]!r} is outside of this schema; only references to # are followed")
        target, there = self._target(unquote(reference[1:]), at)
        name = self.names[reference] = str(len(self.names))
        self.waiting.append((name, there, target))
        return name

    def _target(self, pointer: str, at: str) -> tuple[object, str]:
        """What a reference at `at` means, and its own place, which for an anchor is that of the reference."""
        found, there = self.root, self.at
        if pointer and not pointer.startswith("/"):
            found, there = _anchored(self.root, pointer), at
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal():
                found, there = found[int(key)] if int(key) < len(found) else None, place(there, int(key))
            else:
                found, there = found.get(key) if isinstance(found, Mapping) else None, place(there, key)
        if found is None:
            raise self._bad(at, f"there is no {('#' + pointer)[:80]!r} in this schema")
        return found, there

    def _count(self, at: str, what: str, more: int, most: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + more
        if self.counts[what] > most:
            raise self._bad(at, f"the schema has more than {most} {what}", "schema_too_large")

    def _bad(self, at: str, what: str, code: str = "invalid_schema") -> InvalidRequest:
        return InvalidRequest(f"{at}: {what}", field=at, code=code)


def _modern(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Older drafts' ways of saying it, as draft 2020-12 says it."""
    found = dict(schema)
    if isinstance(found.get("items"), list):
        found = {("prefixItems" if key == "items" else key): value for key, value in found.items()}
        if not found["prefixItems"]:
            del found["prefixItems"]
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
    found.pop("additionalItems", None)  # without a list of items it means nothing
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if found.get(limit) is True and bound in found:
            found[limit] = found.pop(bound)
        elif found.get(limit) is False:
            del found[limit]
    return found


def _name_pattern(names: object) -> str | None:
    """A rule for the names of an object's members as a pattern; None where it is more than that."""
    if not isinstance(names, Mapping) or names.keys() - {"type", "pattern", "enum"} - ANNOTATIONS:
        return None
    texts, pattern = names.get("enum"), names.get("pattern")
    if isinstance(texts, list) and texts and pattern is None and all(isinstance(text, str) for text in texts):
        return f"^(?:{'|'.join(map(re.escape, texts))})$"
    return pattern if isinstance(pattern, str) and texts is None else None


def _anchored(schema: object, anchor: str) -> object:
    """The schema with that `$anchor`, or None."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if "$id" in value and value is not schema:
                continue  # a schema of its own, with anchors of its own
            if value.get("$anchor") == anchor:
                return value
            waiting.extend(inner for key, inner in value.items() if key not in ("enum", "const"))
        elif isinstance(value, list):
            waiting.extend(value)
    return None


def _strings(values: list[object]) -> list[str]:
    """All strings inside of JSON values, names of members too."""
    found: list[str] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return found
