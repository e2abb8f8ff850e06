"""Texts of grammars in llguidance's two forms: its dialect of Lark, and the JSON form that joins several grammars.

White space between the parts of JSON is what chat templates print, ", " and ": ", and nothing else: a model can't fill
its answer with spaces, and most of the tokens between values are forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]

ITEM, KEY = ", ", ": "
_OPTIONS = {"whitespace_flexible": False, "item_separator": ITEM, "key_separator": KEY}


def spaced(schema: Json) -> Json:
    """A schema, as `read_schema` makes it, with the rule about white space, for Lark's `%json` and for `joined`."""
    return schema | {"x-guidance": _OPTIONS}


def inline(schema: Json) -> str:
    """A schema as a part of a Lark rule."""
    return f"%json {json.dumps(spaced(schema), ensure_ascii=False)}"


def literal(text: str) -> str:
    """A text as a part of a Lark rule: exactly these characters."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression as a part of a Lark rule."""
    return f"/{escaped(pattern)}/"


def escaped(pattern: str) -> str:
    """A regular expression without the characters that would end it in Lark, or hide its lines."""
    found, skip = [], False
    for letter in pattern:
        found.append("\\/" if letter == "/" and not skip else "\\n" if letter == "\n" else letter)
        skip = letter == "\\" and not skip
    return "".join(found)


def one_of(texts: Iterable[str]) -> str:
    """A Lark grammar of these texts."""
    return f"start: CHOICE\nCHOICE: {' | '.join(map(literal, texts))}\n"


def token(id: int) -> str:
    """A token by its number as a part of a Lark rule, not of a terminal."""
    return f"<[{id}]>"


class Spelling:
    """Texts as parts of Lark rules, not of terminals: what is an added token in them by its number."""

    def __init__(self, added: Mapping[str, int]) -> None:
        """The ids of added tokens by their texts; where several begin, the longest counts."""
        self._added = added
        texts = sorted(filter(None, added), key=len, reverse=True)
        self._border = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def of(self, text: str) -> str:
        """The part."""
        return self.row(self._border.split(text) if self._border else [text])

    def row(self, pieces: Iterable[str]) -> str:
        """The part, of pieces that are added tokens or hold none."""
        return " ".join(token(self._added[one]) if one in self._added else literal(one) for one in pieces if one)


def tokens(ids: Iterable[int]) -> str:
    """Any of these tokens, at least one, as a part of a Lark rule."""
    runs: list[list[int]] = []
    for id in sorted(set(ids)):
        if runs and runs[-1][1] == id - 1:
            runs[-1][1] = id
        else:
            runs.append([id, id])
    return f"<[{','.join(f'{first}-{last}' if last > first else str(first) for first, last in runs)}]>"


def joined(frame: str, parts: Mapping[str, Json | str]) -> str:
    """Grammars in one text: a Lark grammar `frame` that refers to the parts as `@name`; a part is a schema or Lark."""
    named = [
        {"name": name, _form(part): part if isinstance(part, str) else spaced(part)} for name, part in parts.items()
    ]
    return json.dumps({"grammars": [{"name": "frame", "lark_grammar": frame}, *named]}, ensure_ascii=False)


def alone(part: Json | str) -> str:
    """One grammar as a text."""
    return json.dumps(
        {"grammars": [{_form(part): part if isinstance(part, str) else spaced(part)}]}, ensure_ascii=False
    )


def _form(part: Json | str) -> str:
    return "lark_grammar" if isinstance(part, str) else "json_schema"
