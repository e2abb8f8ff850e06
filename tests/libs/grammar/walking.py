"""Walks texts through grammars, as an engine would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

import penstock.grammar.text as texts
from penstock.grammar.schema import read_schema

MINI = Path(__file__).parents[3] / "libs/penstock/models/penstock-mini/tokenizer.json"
TOKENIZER = LLTokenizer(MINI.read_text())


def matcher(grammar: str, tokenizer: LLTokenizer = TOKENIZER) -> LLMatcher:
    """The beginning of a text of a grammar that must be right."""
    found = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    assert not found.is_error(), found.get_error()
    return found


def accepts(grammar: str, answer: str, tokenizer: LLTokenizer = TOKENIZER) -> bool:
    """Whether `answer`, as the model's tokens, is a whole text of the grammar."""
    found = matcher(grammar, tokenizer)
    tokens = tokenizer.tokenize_str(answer, parse_special=True)
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def grammar_of(schema: Any) -> str:
    """The grammar of a schema."""
    return texts.alone(read_schema(schema, "schema"))


def allows(schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema has the value, written as chat templates write it."""
    return accepts(grammar_of(schema), json.dumps(value, ensure_ascii=False))
