"""Which tokens hold a word, or go on with one: what a plain search of every token finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.grammar.joining import joins, last_joins
from penstock.grammar.tokenizer import GrammarTokenizer
from penstock.grammar.vocabulary import Vocabulary
from penstock.models import embedded

LETTERS = "ab_ .é́不ก1"
"""One of them is an accent that stands behind its letter."""
pieces = st.text(LETTERS, min_size=1, max_size=6).map(str.encode)
cut = st.tuples(pieces, st.integers(0, 2), st.integers(0, 2)).map(
    lambda part: part[0][part[1] : len(part[0]) - part[2]]
)
words = st.text(LETTERS, min_size=1, max_size=3).map(str.encode)


def joining(text: bytes) -> bool:
    """Whether the first whole character of a text joins what stands before it."""
    begun = [text[:size].decode() for size in range(1, 5) if is_text(text[:size])]
    return bool(begun) and joins(begun[0][0])


def is_text(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False


def places(token: bytes, word: bytes) -> list[int]:
    return [at for at in range(len(token)) if token.startswith(word, at)]


@given(st.lists(cut, max_size=20), words, st.booleans(), st.booleans())
def test_it_finds_what_a_plain_search_finds(texts, word, before, behind):
    vocabulary = Vocabulary(texts)
    holding = {
        number
        for number, text in enumerate(texts)
        for at in places(text, word)
        if not (before and (at == 0 or last_joins(text[:at]))) and not (behind and joining(text[at + len(word) :]))
    }
    assert {*vocabulary.holding(word, before=before, behind=behind).tolist()} == holding
    beginning = {
        number
        for number, text in enumerate(texts)
        if text.startswith(word) and not (behind and joining(text[len(word) :]))
    }
    assert {*vocabulary.beginning(word, behind=behind).tolist()} == beginning


@pytest.mark.parametrize(
    ("letter", "expected"),
    [*((letter, True) for letter in "aZ_9éßжβ한́٣"), *((letter, False) for letter in " .-'\n不カひกབ၁�🦊")],
)
def test_what_joins(letter, expected):
    assert joins(letter) is expected
    assert last_joins(b"x " + letter.encode()) is expected
    assert not last_joins(letter.encode()[:-1]) and not last_joins(b"")


def test_control_tokens_have_no_text():
    tokenizer = GrammarTokenizer.read(embedded("penstock-mini") / "tokenizer.json", 4100, [2])
    vocabulary = Vocabulary.of(tokenizer)
    assert len(vocabulary.texts) == 4100 and vocabulary.texts[4096:] == [b""] * 4
    assert vocabulary.controls[b"<tool_call>"] == 3 and not any(vocabulary.texts[:7])
    assert vocabulary.texts[tokenizer.core.tokenize_str("weather")[0]] == b"weather"
