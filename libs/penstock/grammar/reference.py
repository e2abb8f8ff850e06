"""Masks as their definition has them: slow, obvious, and the oracle of the fast ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from penstock.grammar.guide import Endings
from penstock.grammar.matcher import GrammarLeft, limits
from penstock.grammar.tokenizer import GrammarTokenizer, tokens_of


def legal(tokenizer: GrammarTokenizer, text: str, output: Sequence[int], endings: Endings) -> set[int]:
    """The tokens that may follow `output` in a text of the grammar `text`; every call replays all of the output in a
    matcher of its own. Raises GrammarLeft when the output is no beginning of such a text."""
    matcher = LLMatcher(tokenizer.core, text, log_level=0, limits=limits())
    for token in output:
        if token in endings.ends or not matcher.consume_token(token):
            raise GrammarLeft("the output is no beginning of a text of the grammar")
    allowed = set(tokens_of(np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)))
    satisfied = matcher.is_accepting()
    allowed = {token for token in allowed if token < tokenizer.vocab_size} - set(tokenizer.core.eos_tokens)
    if satisfied and not allowed:
        allowed = set(endings.ends or tokenizer.eos)
    elif satisfied and endings.early:
        allowed |= tokenizer.eos
    if len(output) < endings.least and allowed - endings.ends:
        allowed -= endings.ends
    return allowed


def masks(
    tokenizer: GrammarTokenizer, text: str, output: Sequence[int], drafts: Sequence[int], endings: Endings
) -> list[set[int]]:
    """The tokens that may follow `output`, and each of `drafts` behind it."""
    return [legal(tokenizer, text, [*output, *drafts[:count]], endings) for count in range(len(drafts) + 1)]
