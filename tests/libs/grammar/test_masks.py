"""Masks, made of many texts and drafts at a time, against matchers that replay every text from its beginning."""

from __future__ import annotations

import random
import threading

import pytest
from llguidance import LLMatcher

from penstock.grammar import masks, reference
from penstock.grammar.guide import Endings
from penstock.grammar.masks import MaskAsk, MaskMaker
from penstock.grammar.matcher import GrammarLeft
from penstock.grammar.tokenizer import tokens_of
from penstock.testing import schemas


@pytest.fixture(params=["one by one", "together"], autouse=True)
def way(request, monkeypatch):
    """Few masks are made one after the other, many in a few calls of llguidance: the same masks."""
    if request.param == "together":
        monkeypatch.setattr(masks, "_FEW_WORDS", 0)


def rows_of(made, number, drafts):
    at = made.first[number]
    return [set(tokens_of(row)) for row in made.rows[at : at + 1 + len(drafts)]]


@pytest.mark.parametrize("group", range(8))
def test_masks_are_those_of_the_definition(tokenizer, guide_of, group):
    """Texts go on in steps of several tokens, behind drafts that are right, wrong, or right for a while."""
    source, maker, stop = random.Random(group), MaskMaker(2), 4
    texts = []
    for number in range(group * 6, group * 6 + 6):
        schema = schemas.schema(number)
        grammar = schemas.grammar(schema)
        written = schemas.written(schemas.instance(schema, number))
        ids = tokenizer.core.tokenize_str(written)
        endings = [
            Endings(tokenizer.eos),
            Endings(tokenizer.eos | {stop}, least=source.randrange(6)),
            Endings(frozenset({stop}) | tokenizer.eos, early=False),
        ][number % 3]
        begin = source.randrange(3)
        texts.append((grammar, ids, endings, begin, guide_of(grammar, endings, begin)))
    places = [0] * len(texts)
    over = False
    while not over:
        over = all(place == len(text[1]) for place, text in zip(places, texts, strict=True))
        asks, expected = [], []
        for place, (grammar, ids, endings, begin, guide) in zip(places, texts, strict=True):
            known = ids[:place]
            drafts = tuple(ids[place : place + source.randrange(5)])
            if drafts and source.random() < 0.3:
                drafts = (*drafts[:-1], source.randrange(4096))
            asks.append(MaskAsk(guide, [9] * begin + known, drafts))
            rows = reference.masks(tokenizer, grammar, known, (), endings)
            for count in range(1, len(drafts) + 1):
                if drafts[count - 1] not in rows[-1] or drafts[count - 1] in endings.ends:
                    break
                rows += [reference.legal(tokenizer, grammar, [*known, *drafts[:count]], endings)]
            expected.append(rows)
        made = maker.masks(asks)
        assert not made.failed
        for number, (ask, rows) in enumerate(zip(asks, expected, strict=True)):
            assert rows_of(made, number, ask.drafts)[: len(rows)] == rows
        moves = [source.randrange(1, 6) for _ in places]
        places = [min(place + move, len(text[1])) for place, move, text in zip(places, moves, texts, strict=True)]


def test_masks_after_many_refused_drafts_lack_no_token(tokenizer, guide_of):
    """A matcher that llguidance has rolled back loses legal tokens; a guide that tried drafts in vain must not."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "object", "properties": {"s": {"type": "string"}}} for name in "abcdef"},
        "required": list("abcdef"),
    }
    grammar = schemas.grammar(schema)
    ids = tokenizer.core.tokenize_str(schemas.written({name: {"s": f"text of {name}: 1, 2"} for name in "abcdef"}))
    guide, maker, endings, source = guide_of(grammar), MaskMaker(1), Endings(tokenizer.eos), random.Random(1)
    for place in range(len(ids)):
        drafts = guide.legal([*ids[place : place + 6], *(source.choice(ids) for _ in range(3))])
        made = maker.masks([MaskAsk(guide, ids[:place], drafts)])
        assert rows_of(made, 0, ())[0] == reference.legal(tokenizer, grammar, ids[:place], endings)


def test_a_text_that_leaves_its_grammar_fails_alone(tokenizer, guide_of):
    grammar = LLMatcher.grammar_from_regex("ab+")
    good, bad = guide_of(grammar), guide_of(grammar)
    a, b, c = (tokenizer.core.tokenize_str(letter)[0] for letter in "abc")
    made = MaskMaker(1).masks([MaskAsk(bad, [a, c]), MaskAsk(good, [a], (b,))])
    assert list(made.failed) == [0] and isinstance(made.failed[0], GrammarLeft)
    assert rows_of(made, 1, (b,)) == reference.masks(tokenizer, grammar, [a], [b], Endings(tokenizer.eos))
    assert list(MaskMaker(1).masks([MaskAsk(bad, [a, c, b])]).failed) == [0]  # and stays so


def test_nothing_follows_a_draft_that_is_illegal_and_it_costs_no_legal_token(tokenizer, guide_of):
    grammar = LLMatcher.grammar_from_regex("ab+")
    a, b, c = (tokenizer.core.tokenize_str(letter)[0] for letter in "abc")
    guide = guide_of(grammar)
    made = MaskMaker(1).masks([MaskAsk(guide, [a], (b, c, b))])
    assert not made.failed
    assert rows_of(made, 0, (b,)) == reference.masks(tokenizer, grammar, [a], [b], Endings(tokenizer.eos))
    assert guide.legal([b, c, b]) == (b,)
    assert rows_of(MaskMaker(1).masks([MaskAsk(guide, [a, b])]), 0, ()) == reference.masks(
        tokenizer, grammar, [a, b], [], Endings(tokenizer.eos)
    )


def test_copies_in_many_threads(tokenizer, guide_of):
    """Guides of one compiled grammar are used in different threads at the same time."""
    grammar = schemas.grammar(schemas.HAND_WRITTEN[11])
    ids = tokenizer.core.tokenize_str('{"city": "Rome", "unit": "celsius"}')
    template, wrong = guide_of(grammar), []
    expected = [reference.legal(tokenizer, grammar, ids[:place], Endings(tokenizer.eos)) for place in range(len(ids))]

    def work():
        for _ in range(20):
            guide, maker = template.copy(), MaskMaker(1)
            for place in range(len(ids)):
                if rows_of(maker.masks([MaskAsk(guide, ids[:place])]), 0, ())[0] != expected[place]:
                    wrong.append(place)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_draft_is_tried_on_a_texts_own_matcher(tokenizer, guide_of, monkeypatch):
    """llguidance rolls back what it tried, and a matcher that was rolled back may lose legal tokens later."""
    tried = []

    class Watched:
        def unsafe_compute_mask_ptr_with_draft_token(self, drafted, *place):
            tried.extend(core for core, _, _ in drafted)

    monkeypatch.setattr(masks, "LLExecutor", lambda threads: Watched())
    monkeypatch.setattr(masks, "_FEW_WORDS", 0)
    guide = guide_of(LLMatcher.grammar_from_regex("ab+"))
    a, b = (tokenizer.core.tokenize_str(letter)[0] for letter in "ab")
    own = guide.matcher.core
    masks.MaskMaker(1).fill(masks.StepMasks([MaskAsk(guide, [a], (b, b))], guide.tokenizer.words))
    assert len(tried) == 1 and tried[0] is not own and guide.matcher.core is own
