"""The grammar of an answer that may, or must, hold calls: content, reasoning and calls, as the family writes them.

Arguments always follow their function's schema: arguments that cannot be read are worth nothing. Where calls are left
to the model, the answer is free text until it opens a call; behind its calls nothing follows. Reasoning is a part of
the same grammar, so that there is no border at which another grammar would have to begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.chat.formats.format import ToolFormat, WrittenCalls
from penstock.chat.formats.values import Values, values_of
from penstock.chat.messages import Tool
from penstock.grammar.recipe import Part, Recipe
from penstock.grammar.text import Spelling, literal, regex, token

_ANY = r"(.|\n)*"
_SAYS_MORE = {"additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties"}
_SAYS_MORE |= {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}
_JSON_PIECES = re.compile(r'"[^"]*"|[:,] |[][{}()]|[^][{}()":,]+|.')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What a request allows."""

    tools: Sequence[tuple[str, Tool]]
    """The functions that may be called, each with the place of its schema in the request."""
    required: bool = False
    parallel: bool = True
    thinks: bool = False
    """Whether the answer may begin with reasoning."""
    thinking: bool = False
    """Whether the prompt has opened it."""
    content: Part | None = None
    """What an answer without calls must be; None: any text."""


def call_recipe(family: ToolFormat, rules: CallRules, tokens: Mapping[str, int], loose: Iterable[str] = ()) -> Recipe:
    """The grammar of an answer. `tokens` are the ids of added tokens by their texts. `loose` are places of schemas that
    are not followed: the arguments are any object."""
    assert family.written is not None
    frame = _Frame(family, family.written, rules, tokens)
    return frame.recipe(frozenset(loose))


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters that are named are all that the function has, unless its schema says more: programs that call it with
    others get an error."""
    if "properties" not in parameters or _SAYS_MORE & set(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}


class _Frame:
    """Writes the grammar of one request."""

    def __init__(self, family: ToolFormat, written: WrittenCalls, rules: CallRules, tokens: Mapping[str, int]) -> None:
        self._family = family
        self._written = written
        self._rules = rules
        self._tokens = tokens
        self._spelling = Spelling(tokens)
        self._values: Values = values_of(family.values, self.text)

    def recipe(self, loose: frozenset[str]) -> Recipe:
        """See `call_recipe`."""
        for number, (at, tool) in enumerate(self._rules.tools):
            self._values.rule(f"a{number}", _closed(tool.parameters), at, any_object=at in loose)
        lines = ["start: " + _row([self._thinking(), "answer"]), *self._answer(), *self._calls()]
        parts = dict(self._values.parts)
        if self._rules.content is not None:
            parts["content"] = self._rules.content
        return Recipe(tuple(parts.items()), "\n".join([*lines, *self._values.lines]) + "\n")

    def text(self, text: str) -> str:
        """A text as a part of a rule: what are added tokens by their numbers."""
        if self._rules.content is not None and self._family.leads:
            # JSON may begin the same way, so that no piece may be longer than its
            return self._spelling.row(_JSON_PIECES.findall(text))
        return self._spelling.of(text)

    def _answer(self) -> list[str]:
        rules = self._rules
        reasons = rules.thinks or rules.thinking
        lines = self._reasoning() if reasons else []
        if rules.required or rules.content is not None:
            gap = ["GAP"] if reasons else []
            lines += [r"GAP: /\n{0,2}/"] if reasons else []
            return [*lines, "answer: " + _row([*gap, "calls" if rules.required else "(calls | @content)"])]
        return [*lines, *self._free()]

    def _free(self) -> list[str]:
        """Text, then calls: up to the text that opens them, if that is no token."""
        if self._family.leads:
            # A terminal each: of the text that begins like a call, the longest terminal is taken.
            leads = [f"LEAD_{number}: /[ \\n]{{0,4}}/ {literal(self._head(number))}" for number in self._numbers]
            first = " | ".join(_row([f"LEAD_{number}", *self._rest(number)]) for number in self._numbers)
            answer = f"answer: {_row([f'({first})', self._more(), self.text(self._written.end)])} | TEXT"
            return [answer, f"TEXT: /{_ANY}/ & ~/{self._first()}/", *leads]
        opening = self._opening()
        before = _without(opening)
        if opening in self._tokens:
            return [f"answer: TEXT calls?\nTEXT: {before}"]
        return [
            "answer: TEXT | OPENED opened", f"opened: {self._several(opening)}", f"TEXT: {before}",
            f"OPENED: ({before}) {literal(opening)}",
        ]  # fmt: skip

    @property
    def _numbers(self) -> range:
        return range(len(self._rules.tools))

    def _opening(self) -> str:
        """The text at which content ends: the first marker."""
        head = self._family.heads[0][0]
        assert isinstance(head, str)
        return head

    def _calls(self) -> list[str]:
        """Rules for one call that follows another, and for all calls of an answer."""
        number = ["NUMBER: /[0-9]+/"] if self._written.number else []
        return [f"calls: {self._several('')}", f"call: {self._either(self._written.before)}", *number]

    def _several(self, opening: str) -> str:
        """Calls whose `opening` has come."""
        first = (self._written.begin + self._written.before).removeprefix(opening)
        return _row([f"({self._either(first)})", self._more(), self.text(self._written.end)])

    def _either(self, before: str) -> str:
        """A call of any function, with `before` in front of its name."""
        texts = (before + self._rules.tools[number][1].name for number in self._numbers)
        return " | ".join(_row([self._named(text), *self._rest(number)]) for number, text in enumerate(texts))

    def _named(self, text: str) -> str:
        """What ends in a name, and everything up to the arguments."""
        if self._written.number:
            return _row([self.text(text + ":"), "NUMBER", self.text(self._written.behind)])
        return self.text(text + self._written.behind)

    def _head(self, number: int) -> str:
        written = self._written
        return written.begin + written.before + self._rules.tools[number][1].name + written.behind

    def _rest(self, number: int) -> list[str]:
        return [f"a{number}", self.text(self._written.after)]

    def _more(self) -> str:
        """Further calls."""
        if not self._rules.parallel or self._written.between is None:
            return ""
        return f"({_row([self.text(self._written.between), 'call'])})*"

    def _first(self) -> str:
        """A regular expression of everything that would be read as the beginning of a call."""
        space = r"[ \t\r\n]*"
        if self._family.values == "json":
            return rf'{space}\{{{space}"(name|type)"{_ANY}'
        return rf"{space}\[{space}[a-zA-Z_][a-zA-Z0-9_.\-]*{space}\({_ANY}"

    def _thinking(self) -> str:
        if self._rules.thinking:
            return "thought"
        return f"({_row([self.text(self._family.reasoning.open), 'thought'])})?" if self._rules.thinks else ""

    def _reasoning(self) -> list[str]:
        closing = self._family.reasoning.close
        if closing in self._tokens:
            return [f"thought: THOUGHT {token(self._tokens[closing])}\nTHOUGHT: {_without(closing)}"]
        return [f"thought: THOUGHT\nTHOUGHT: ({_without(closing)}) {literal(closing)}"]


def _row(pieces: Iterable[str]) -> str:
    return " ".join(piece for piece in pieces if piece)


def _without(marker: str) -> str:
    """A terminal of any text without a marker: a parser takes it for one, whichever tokens spell it."""
    return f"/{_ANY}/ & ~/{_ANY}{_spelled(marker)}{_ANY}/"


def _spelled(text: str) -> str:
    """A regular expression of exactly this text, as it stands between slashes."""
    return regex(re.escape(text))[1:-1]
