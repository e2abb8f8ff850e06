"""Reasoning and what comes behind it in one grammar, so that there is no border between two that could be missed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.grammar.recipe import Part, Recipe
from penstock.grammar.text import Spelling, literal, regex, token

_ANY = r"(.|\n)*"


def after_thinking(part: Part, markers: tuple[str, str], tokens: Mapping[str, int], *, opened: bool) -> Recipe:
    """The answer is a text of `part`, behind reasoning: any text between the two markers.

    `opened`: the prompt has the first marker; otherwise the model decides whether it thinks. `tokens` are the ids of
    added tokens by their texts: a marker that is one of them, or the part of the first that is, is that token and
    nothing else.
    """
    begin, end = markers
    # A reader ends the reasoning at the first text that looks like its end, however it is tokenized.
    inside = f"/{_ANY}/ & ~/{_ANY}{regex(re.escape(end))[1:-1]}{_ANY}/"
    thought = f"THOUGHT {token(tokens[end])}" if end in tokens else "THOUGHT_END"
    terminal = f"THOUGHT: {inside}" if end in tokens else f"THOUGHT_END: ({inside}) {literal(end)}"
    start = "thought GAP @answer" if opened else f"({Spelling(tokens).of(begin)} thought GAP)? @answer"
    frame = f"start: {start}\nthought: {thought}\n{terminal}\nGAP: /\\n{{0,2}}/\n"
    return Recipe((("answer", part),), frame)
