"""The embedded model's tokens, and grammars over them."""

from __future__ import annotations

import pytest

from penstock.checkpoint import inspect
from penstock.grammar.guide import Endings, Guide
from penstock.grammar.matcher import Matcher
from penstock.grammar.tokenizer import GrammarTokenizer
from penstock.models import embedded


@pytest.fixture(scope="session")
def tokenizer() -> GrammarTokenizer:
    checkpoint = inspect(embedded("penstock-mini"))
    return GrammarTokenizer.read(checkpoint.tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids)


@pytest.fixture
def guide_of(tokenizer):
    def make(text: str, endings: Endings | None = None, begin: int = 0) -> Guide:
        return Guide(tokenizer, Matcher.of(tokenizer, text), endings or Endings(tokenizer.eos), begin)

    return make
