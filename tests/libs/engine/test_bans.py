"""Bad words, however they are tokenized."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.checkpoint import inspect
from penstock.engine import bans as bans_module
from penstock.engine.bans import RequestBans, WordBans
from penstock.engine.errors import RequestRefused
from penstock.engine.grammars import ModelTokens, tokenizer_of
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.reference import completing
from penstock.grammar.joining import standing
from penstock.grammar.vocabulary import Vocabulary

LETTERS = "fox .é不"
texts = st.lists(st.text(LETTERS, max_size=4).map(str.encode), min_size=2, max_size=30)
bad = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


@given(texts, bad, st.lists(st.integers(0, 29), max_size=12), st.integers(0, 12))
@example([b"fo", b"x", b"f", b"o"], ["fox"], [0, 2, 3], 1)
def test_the_tokens_are_those_of_a_plain_search(vocabulary, words, said, drafts):
    said = [token % len(vocabulary) for token in said]
    bans = WordBans(words, frozenset(), Vocabulary(vocabulary))
    known = max(0, len(said) - drafts)
    assert bans.after([0, 1, *said[:known]], 2, said[known:]) == completing(words, said, vocabulary)


@given(texts, bad, st.lists(st.integers(0, 1 << 16), max_size=40))
def test_a_text_that_keeps_to_it_never_has_a_bad_word(vocabulary, words, wishes):
    """Also where tokens begin and end within characters."""
    vocabulary = [*vocabulary, *(bytes([byte]) for byte in "éfox".encode()), b""]
    bans, said = WordBans(words, frozenset(), Vocabulary(vocabulary)), []
    for wish in wishes:
        left = sorted({*range(len(vocabulary))} - bans.after(said, 0))
        said.append(left[wish % len(left)])
        text = b"".join(vocabulary[token] for token in said).decode(errors="replace")
        assert not any(standing(word, text) for word in words), text


SPELLED = [b"fox", b" fox", b"f", b"o", b"x", b" f", b"ox", b"foxes", b" foxy", b"fire", b"(fox)", b"", b"s", b"\n"]


@pytest.mark.parametrize(
    ("said", "banned"),
    [
        ([], {b"fox", b" fox", b"(fox)"}),
        ([b"fire"], {b" fox", b"(fox)"}),
        ([b"f"], {b"ox", b" fox", b"(fox)"}),
        ([b" f", b"o"], {b"x", b" fox", b"(fox)"}),
        ([b" f", b"", b"o"], {b"x", b" fox", b"(fox)"}),
        ([b"fire", b"f", b"o"], {b" fox", b"(fox)"}),
        ([b"\n"], {b"fox", b" fox", b"(fox)"}),
    ],
)
def test_words_that_hold_it_are_left(said, banned):
    bans = WordBans(["fox"], frozenset(), Vocabulary(SPELLED))
    assert {SPELLED[token] for token in bans.after([SPELLED.index(text) for text in said], 0)} == banned


def test_what_is_banned_anyway_and_control_tokens():
    vocabulary = Vocabulary([*SPELLED, b"", b""], {b"<call>": len(SPELLED), b"<|fox|>": len(SPELLED) + 1})
    bans = WordBans(["<call>", "fox"], frozenset({5}), vocabulary)
    assert bans.after([], 0) == {0, 1, 5, 10, len(SPELLED)}, "a word bans the control token of its name alone"
    assert bans.after([], 0) is bans.after([9, 13], 0)


def test_where_nothing_would_be_left_nothing_is_banned():
    assert WordBans(["a", "b"], frozenset(), Vocabulary([b"a", b"b"])).after([], 0) == frozenset()
    assert WordBans(["a", "b"], frozenset(), Vocabulary([b"a", b"b", b""])).after([], 0) == {0, 1}


def without(*words, banned=()):
    return SamplingParams(max_tokens=1, bad_words=words, banned_token_ids=frozenset(banned))


def at_once(bans, word):
    """What the word bans, if no thread is needed to say it."""
    asking = bans.of(without(word))
    try:
        asking.send(None)
    except StopIteration as made:
        return made.value
    asking.close()
    return None


async def test_a_known_list_needs_no_thread(config):
    checkpoint = inspect(config.model)
    bans = RequestBans(ModelTokens(checkpoint))
    fox, same, more = await asyncio.gather(*(bans.of(without("fox", banned=banned)) for banned in ([], [], [5])))
    assert fox is same
    expected = WordBans(["fox"], frozenset(), Vocabulary.of(tokenizer_of(checkpoint))).after([], 0)
    assert (fox.after([], 0), more.after([], 0)) == (expected, expected | {5})
    for number in range(30):
        await bans.of(without(f"a{number}"))
    assert at_once(bans, "fox") is fox
    await bans.of(without("one more"))
    assert at_once(bans, "fox") is fox and at_once(bans, "a0") is not None, "those used last stay"
    await bans.of(without("one too many"))
    assert at_once(bans, "a1") is None and at_once(bans, "fox") is fox


async def test_a_tokenizer_that_can_not_be_read_is_asked_again():
    """Every request is refused by name, until it can be read."""

    def load():
        raise ValueError("no tokens")

    bans = RequestBans(load)
    for _ in range(2):
        with pytest.raises(RequestRefused, match="bad_words: no tokens"):
            await bans.of(without("fox"))


def test_what_is_kept_is_bounded_by_its_size(monkeypatch):
    monkeypatch.setattr(bans_module, "_MOST_KEPT", 4)
    vocabulary = [bytes([byte]) for byte in b"abcdefgh"] + [b"ab", b"abc"]
    bans = WordBans(["abcdefg"], frozenset({7}), Vocabulary(vocabulary))
    texts = [list(range(end)) for end in range(7)]
    first = [bans.after(text, 0) for text in texts]
    assert sum(map(len, bans._kept.values())) <= 4 and len(bans._kept) < len(texts)
    assert [bans.after(text, 0) for text in texts] == first
    assert first == [completing(["abcdefg"], text, vocabulary) | {7} for text in texts]
