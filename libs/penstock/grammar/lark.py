"""Checks a client's grammar in llguidance's Lark, as far as it is not the compiler's to say.

Refused is what a server can't keep, or what isn't a client's to say: sampling options and token limits of rules,
hidden stops, references to other grammars, special tokens. Schemas inside are checked like all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from penstock.errors import InvalidRequest
from penstock.grammar import text
from penstock.grammar.schema import check_literal, read_schema

_PIECE = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
      | (?P<token><[^\s<>"]*>)
      | (?P<reference>@\s*[A-Za-z_])
      | (?P<json>%json\s*(?={))
      | (?P<command>%(?:lark|regex|llguidance|declare|override|extend)\b)
      | (?P<options>(?<=\w)\[[^\]"]*(?:"(?:\\.|[^"\\])*"[^\]"]*)*\]\s*:)""",
    re.VERBOSE,
)
_REFUSED = {
    "token": "special tokens like {0} can't be asked for",
    "reference": "other grammars can't be referred to: {0}",
    "command": "{0} is not supported",
}
_OPTION = re.compile(r"\b(temperature|max_tokens|stop|stop_capture)\b")
_DECODER = json.JSONDecoder()


def check_lark(grammar: str, at: str, control: Collection[str] = ()) -> str:
    """The grammar to compile. Raises InvalidRequest for what is never served, before the compiler sees it."""
    found, begin = [], 0
    while match := _PIECE.search(grammar, begin):
        found += [grammar[begin : match.start()], match[0]]
        kind, begin = str(match.lastgroup), match.end()
        if kind in _REFUSED:
            raise _bad(at, grammar, match.start(), _REFUSED[kind].format(repr(match[0][:40])))
        if kind == "options" and (option := _OPTION.search(match[0])):
            raise _bad(at, grammar, match.start(), f"the option {option[0]} of a rule is not supported")
        if kind in ("string", "regex"):
            _check_text(match[0], at, grammar, match.start(), control)
        elif kind == "json":
            try:
                schema, begin = _DECODER.raw_decode(grammar, begin)
            except (ValueError, RecursionError):
                raise _bad(at, grammar, match.start(), "%json is not followed by a JSON object") from None
            found[-1] = text.inline(read_schema(schema, f"{at}.%json", control))
    return "".join([*found, grammar[begin:]])


def _check_text(piece: str, at: str, grammar: str, start: int, control: Collection[str]) -> None:
    try:
        check_literal(re.sub(r"\\(.)", r"\1", piece), at, control)
    except InvalidRequest as error:
        raise _bad(at, grammar, start, error.message.partition(": ")[2]) from None


def _bad(at: str, grammar: str, start: int, what: str) -> InvalidRequest:
    line = grammar.count("\n", 0, start) + 1
    return InvalidRequest(f"{at}: line {line}: {what}", field=at, code="invalid_schema")
