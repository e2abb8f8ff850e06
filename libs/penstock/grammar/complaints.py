"""The compiler's complaints, in words that say what to change and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.grammar import text
from penstock.grammar.recipe import Recipe
from penstock.grammar.schema import place
from penstock.grammar.whitespace import as_sent

_MOST_TOLD = 200
_MOST_TRIES = 200
"""Schemas inside of a schema that are tried to find the place of a fault."""
_WORDS = (
    (r"oneOf constraints", "oneOf is not supported where several options can match together; use anyOf"),
    (r"Unsatisfiable schema: (?P<why>[^\n]*)", "no value can match it: {why}"),
    (r"only supported when all keys", "minProperties and maxProperties need all properties to be required"),
    (r"not disjoint", "patternProperties must not match the same names"),
    (r"integer range|float range", "no number is between its bounds, or they are too far apart"),
    (r"look-?around", "look-around and anchors in the middle of a regular expression are not supported"),
    (r"regex parse error|invalid regex|regex", "is no regular expression that is supported"),
    (r"no text satisfies it|NoExtension", "no text can match it"),
    (r"Current row has|fuel|too (?:complex|large|many|big)|limit|exceeded|ParserTooComplex", "is too complex"),
)
_KEYWORDS = (
    (r"oneOf", ("oneOf",)),
    (r"only supported when all keys", ("minProperties", "maxProperties")),
    (r"not disjoint", ("patternProperties",)),
    (r"regex|look-?around", ("pattern", "patternProperties")),
    (r"minimum", ("minimum", "exclusiveMinimum")),
    (r"minLength|minItems", ("minLength", "minItems")),
)
"""What an error may speak of."""


def complaint(error: str) -> str:
    """The compiler's error in our words; its own first line where we have none."""
    for pattern, words in _WORDS:
        if found := re.search(pattern, error, re.IGNORECASE):
            return words.format(**{name: value[:_MOST_TOLD] for name, value in found.groupdict().items()})
    return (error.strip().splitlines() or ["can't be followed"])[0][:_MOST_TOLD]


def locate(recipe: Recipe, grammar: str, wrong: Callable[[str], str], error: str) -> tuple[str, str]:
    """The place of the fault in the request, as narrow as it can be found, and the error there.

    `wrong` says what is wrong with a grammar by itself; `error` is what is wrong with this one.
    """
    built = {part.get("name"): part for part in msgspec.json.decode(grammar)["grammars"]}
    for name, part in recipe.parts:
        form = built.get(name, built.get(None, {}))
        schema = form.get("json_schema")
        found = wrong(text.alone(schema if schema is not None else form.get("lark_grammar", "")))
        if not found:
            continue
        return (_place(schema, part.at, wrong, found), found) if schema is not None else (part.at, found)
    return recipe.at, error


def _place(schema: text.Json, at: str, wrong: Callable[[str], str], error: str) -> str:
    """The place of the keyword that an error speaks of."""
    inner, at = _narrowest(schema, at, wrong, error)
    for pattern, keywords in _KEYWORDS:
        if re.search(pattern, error, re.IGNORECASE):
            return next((place(at, keyword) for keyword in keywords if keyword in inner), at)
    return at


def _narrowest(schema: text.Json, at: str, wrong: Callable[[str], str], error: str) -> tuple[text.Json, str]:
    """The innermost schema that has the same fault alone, and its place."""
    definitions = {"$defs": schema.get("$defs", {})}
    tries = 0
    while True:
        for inner, there in _inside(schema, at):
            tries += 1
            if tries > _MOST_TRIES:
                return schema, at
            if isinstance(inner, dict) and wrong(text.alone(inner | definitions)) == error:
                schema, at = inner, there
                break
        else:
            return schema, at


def _inside(schema: text.Json, at: str) -> Iterator[tuple[Any, str]]:
    for keyword in ("properties", "patternProperties"):
        for name, inner in schema.get(keyword, {}).items():
            yield inner, place(place(at, keyword), as_sent(name))
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for number, inner in enumerate(schema.get(keyword, ())):
            yield inner, place(place(at, keyword), number)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield schema[keyword], place(at, keyword)
