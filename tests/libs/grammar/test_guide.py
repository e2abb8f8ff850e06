"""One text's way through its grammar: ends, forced tokens, drafts, errors."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from penstock.grammar.guide import Endings
from penstock.grammar.masks import MaskAsk, MaskMaker
from penstock.grammar.matcher import MOST_CHARACTERS, GrammarBroken, GrammarLeft, Matcher
from penstock.grammar.tokenizer import GrammarTokenizer, tokens_of
from penstock.models import embedded
from penstock.testing import schemas

ABC = LLMatcher.grammar_from_regex("abc")


def ids_of(tokenizer, text):
    return tokenizer.core.tokenize_str(text)


def legal(guide, tokens):
    made = MaskMaker(1).masks([MaskAsk(guide, tokens)])
    if made.failed:
        raise made.failed[0]
    return set(tokens_of(made.rows[0]))


def test_a_complete_text_may_only_end(tokenizer, guide_of):
    text = ids_of(tokenizer, "abc")
    assert legal(guide_of(ABC), text) == tokenizer.eos
    assert legal(guide_of(ABC, Endings(tokenizer.eos | {77, 78})), text) == tokenizer.eos | {77, 78}
    assert legal(guide_of(ABC, Endings(tokenizer.eos, least=99)), text) == tokenizer.eos  # nothing else is legal


def test_a_satisfied_grammar_lets_the_text_end(tokenizer, guide_of):
    more = LLMatcher.grammar_from_regex("ab*")
    text = ids_of(tokenizer, "a")
    assert tokenizer.eos < legal(guide_of(more), text)
    assert not tokenizer.eos & legal(guide_of(more, Endings(tokenizer.eos, early=False)), text)
    assert not tokenizer.eos & legal(guide_of(more, Endings(tokenizer.eos, least=2)), text)
    assert tokenizer.eos < legal(guide_of(more, Endings(tokenizer.eos, least=1)), text)


def test_nothing_follows_the_end(tokenizer, guide_of):
    guide = guide_of(ABC)
    text = [*ids_of(tokenizer, "abc"), *tokenizer.eos]
    with pytest.raises(GrammarLeft):
        legal(guide, text)
    assert guide.forced == () and guide.legal([5]) == ()


def test_forced_tokens_are_what_the_text_goes_on_with(tokenizer, guide_of):
    schema = {"type": "object", "properties": {"temperature": {"enum": [1, 2]}}, "required": ["temperature"]}
    guide = guide_of(schemas.grammar({**schema, "additionalProperties": False}))
    text = ids_of(tokenizer, '{"temperature": 1}')
    guide.follow(text[:1])
    assert guide.forced and list(guide.forced) == text[1 : 1 + len(guide.forced)]


def test_a_literal_that_is_a_special_token_is_an_error_and_no_end(tokenizer, guide_of):
    """llguidance proposes the special token, allows nothing else, and refuses it: whoever makes grammars refuses such
    literals."""
    guide = guide_of(schemas.grammar({"const": "a <tool_call> b"}))
    tokens = ids_of(tokenizer, '"a ')
    guide.take(tokens)
    assert 3 not in guide.forced and legal(guide, tokens) == {3}
    with pytest.raises(GrammarLeft):
        guide.take([3])
    with pytest.raises(GrammarLeft):
        legal(guide, [*tokens, 3])


def test_drafts_are_cut_before_an_end(tokenizer, guide_of):
    [eos] = tokenizer.eos
    guide = guide_of(LLMatcher.grammar_from_regex("ab*"))
    a, b = ids_of(tokenizer, "a")[0], ids_of(tokenizer, "b")[0]
    assert guide.legal([a, b, eos, b]) == (a, b)
    assert guide.legal([eos]) == () and guide.legal([b]) == ()


def test_a_text_is_followed_from_wherever_it_is(tokenizer, guide_of):
    """Tokens one by one, all at once, and again from the beginning lead to the same state."""
    schema = schemas.schema(5)
    grammar = schemas.grammar(schema)
    text = ids_of(tokenizer, schemas.written(schemas.instance(schema, 5)))
    for place in range(len(text) + 1):
        slow, fast, again = guide_of(grammar, begin=2), guide_of(grammar, begin=2), guide_of(grammar, begin=2)
        for count in range(place + 1):
            slow.follow([1, 1, *text[:count]])
        again.follow([1, 1, *text])
        assert legal(slow, [1, 1, *text[:place]]) == legal(fast, [1, 1, *text[:place]])
        assert legal(again, [1, 1, *text[:place]]) == legal(fast, [1, 1, *text[:place]])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Empty"),
        ("{}", "grammars"),
        ("no grammar at all", "Expected"),
        (LLMatcher.grammar_from_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (LLMatcher.grammar_from_regex("(?=a)b"), "regex"),
        (LLMatcher.grammar_from_json_schema({"$ref": "#"}), "NoExtension|satisf"),
        (LLMatcher.grammar_from_json_schema({"enum": []}), "."),
        ("x" * (MOST_CHARACTERS + 1), "characters"),
    ],
)
def test_a_broken_grammar_says_what_is_wrong(tokenizer, text, told):
    with pytest.raises(GrammarBroken, match=told) as raised:
        Matcher.of(tokenizer, text)
    assert len(str(raised.value)) < 400


def test_an_error_is_no_end_of_the_text(tokenizer, guide_of):
    """llguidance's mask of a matcher in error allows the end, which would cut the text and call it finished."""
    guide = guide_of(ABC)
    with pytest.raises(GrammarLeft):
        guide.take(ids_of(tokenizer, "x"))
    with pytest.raises(GrammarLeft):
        legal(guide, ids_of(tokenizer, "a"))


@pytest.mark.parametrize("vocab_size", [4000, 4096, 4500])
@pytest.mark.parametrize("eos", [frozenset({2}), frozenset({2, 0}), frozenset()])
def test_models_whose_vocabulary_is_not_the_tokenizers(vocab_size, eos, guide_of):
    """No token beyond the model's vocabulary or without letters is legal; a text can always end."""
    content = (embedded("penstock-mini") / "tokenizer.json").read_text()
    tokenizer = GrammarTokenizer(content, vocab_size, eos)
    ends = Endings(eos or frozenset({7}))
    guide = guide_of(LLMatcher.grammar_from_regex("(?s:.*)"), ends)
    guide = type(guide)(tokenizer, Matcher.of(tokenizer, LLMatcher.grammar_from_regex("(?s:.*)")), ends, 0)
    allowed = legal(guide, [])
    assert max(allowed) < min(vocab_size, 4096)
    assert eos == allowed & {0, 2}
    done = type(guide)(tokenizer, Matcher.of(tokenizer, ABC), ends, 0)
    assert legal(done, ids_of(tokenizer, "abc")) == ends.ends


def test_every_schema_of_the_generator_compiles_and_accepts_its_instances(tokenizer, guide_of):
    """Else tests that stand on it would show nothing."""
    for number in range(120):
        schema = schemas.schema(number)
        text = schemas.written(schemas.instance(schema, number))
        guide = guide_of(schemas.grammar(schema))
        guide.take(ids_of(tokenizer, text))
        assert guide.matcher.accepting, (schema, text)
        json.loads(text)
    for schema in schemas.HAND_WRITTEN:
        guide_of(schemas.grammar(schema))
