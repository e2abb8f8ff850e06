"""What an answer has to be, in the words of a client, and the grammar made of it.

A recipe is plain text from end to end: it can be named by a digest and sent to another process, where it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.grammar import text
from penstock.grammar.gbnf import gbnf_to_lark, is_gbnf
from penstock.grammar.lark import check_lark
from penstock.grammar.schema import check_literal, check_pattern, read_schema

Kind = Literal["schema", "object", "regex", "choice", "grammar", "tokens"]
"""What `Part.text` is: a JSON Schema; nothing, for any JSON object; a regular expression; a JSON list of texts, one of
which it must be; a grammar in llguidance's Lark or in llama.cpp's GBNF; a JSON list of tokens, the only ones it has."""

MAX_TEXT = 1 << 20
"""Characters of one schema or grammar."""
_MOST_TOGETHER = 2 * MAX_TEXT
"""Of all parts and the frame."""
MAX_CHOICES = 1_000
MAX_CHOICE_CHARACTERS = 120_000
_SCHEMA: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_CHOICES = msgspec.json.Decoder(list[str])
_TOKENS = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class Part:
    """One constraint of a client."""

    kind: Kind
    text: str
    at: str
    """Its place in the request, for errors."""

    @classmethod
    def schema(cls, schema: object, at: str) -> Part:
        """A JSON Schema. Raises InvalidRequest for one that is too long to be looked at, before it is written: that
        takes one call, in which no other thread runs."""
        length = 0
        for more in _lengths(schema):
            length += more
            if length > MAX_TEXT:
                raise _bad(at, f"must have at most {MAX_TEXT} characters", "schema_too_large")
        return cls("schema", json.dumps(schema), at)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A grammar of parts. Without a frame there is one part, and the answer is a text of it."""

    parts: tuple[tuple[str, Part], ...]
    """By name."""
    frame: str = ""
    """Lark, made by us, that refers to the parts as `@name`."""

    @property
    def at(self) -> str:
        """Where the client has written it, or the first part of it."""
        return self.parts[0][1].at if self.parts else "tools"

    def check_size(self) -> None:
        """Raises InvalidRequest for parts that are too long to be looked at, each or together."""
        if sum(len(part.text) for _, part in self.parts) + len(self.frame) > _MOST_TOGETHER:
            raise _bad(self.at, f"must have at most {_MOST_TOGETHER} characters together", "schema_too_large")
        for _, part in self.parts:
            if len(part.text) > MAX_TEXT:
                what = f"must have at most {MAX_TEXT} characters, not {len(part.text)}"
                raise _bad(part.at, what, "schema_too_large")

    def digest(self) -> bytes:
        """Names the recipe."""
        return hashlib.sha256(msgspec.json.encode(self)).digest()


def answer(part: Part) -> Recipe:
    """The answer is a text of this part."""
    return Recipe((("answer", part),))


def build(recipe: Recipe, control: Collection[str]) -> str:
    """The grammar's text, not yet tried. Raises InvalidRequest naming the place of what is wrong.

    `control` are the texts of the tokenizer's added tokens. Takes as long as it is big: not for an event loop.
    """
    recipe.check_size()
    parts = {name: _part(part, control) for name, part in recipe.parts}
    return text.joined(recipe.frame, parts) if recipe.frame else text.alone(*parts.values())


def _part(part: Part, control: Collection[str]) -> text.Json | str:
    if part.kind == "object":
        return {"type": "object"}
    if part.kind == "schema":
        return read_schema(_decoded(part, _SCHEMA), part.at, control)
    if part.kind == "choice":
        return _choice(part, control)
    if part.kind == "tokens":
        return f"start: {text.tokens(_tokens(part))}*\n"
    if not part.text:
        raise _bad(part.at, "must not be empty")
    if part.kind == "regex":
        check_pattern(part.text, part.at, control)
        return f"start: {text.regex(part.text)}\n"
    if is_gbnf(part.text):
        return gbnf_to_lark(part.text, part.at, control)
    return check_lark(part.text, part.at, control)


def _choice(part: Part, control: Collection[str]) -> str:
    choices = _decoded(part, _CHOICES)
    if not choices or len(choices) > MAX_CHOICES:
        raise _bad(part.at, f"must have 1 to {MAX_CHOICES} texts, not {len(choices)}")
    if sum(map(len, choices)) > MAX_CHOICE_CHARACTERS:
        raise _bad(part.at, f"must have at most {MAX_CHOICE_CHARACTERS} characters in all", "schema_too_large")
    for at, choice in enumerate(choices):
        if not choice:
            raise _bad(part.at, "a text must not be empty")
        check_literal(choice, f"{part.at}[{at}]", control)
    return text.one_of(choices)


def _tokens(part: Part) -> list[int]:
    tokens: list[int] = _decoded(part, _TOKENS)
    if not tokens:
        raise _bad(part.at, "must have at least one token")
    return tokens


def _decoded(part: Part, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(part.text)
    except msgspec.ValidationError:
        raise _bad(part.at, "must be a list of strings") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad(part.at, f"is not valid JSON: {error}") from None


def _lengths(value: object) -> Iterator[int]:
    """The least that each value inside a JSON value adds to its text."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield len(value)
        elif isinstance(value, Mapping):
            yield sum(map(len, value))
            waiting.extend(value.values())
        elif isinstance(value, list):
            yield len(value)
            waiting.extend(value)


def _bad(at: str, what: str, code: str = "invalid_schema") -> InvalidRequest:
    return InvalidRequest(f"{at}: {what}", field=at, code=code)
