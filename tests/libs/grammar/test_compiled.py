"""Grammars compiled in threads: kept, bounded, and harmless when they are hostile."""

from __future__ import annotations

import asyncio
import threading

import pytest
from llguidance import LLMatcher

from penstock.grammar import compiled
from penstock.grammar.compiled import Grammars, GrammarsBusy
from penstock.grammar.guide import Endings
from penstock.grammar.matcher import GrammarBroken, Matcher

TEXTS = [LLMatcher.grammar_from_regex(f"a{{{count}}}") for count in range(1, 9)]


@pytest.fixture
def ends(tokenizer):
    return Endings(tokenizer.eos)


@pytest.fixture
def counted(monkeypatch):
    """Texts that were compiled, in order; `gate` holds the threads that compile until it is set."""
    texts, gate, real = [], threading.Event(), Matcher.of
    gate.set()

    def of(tokenizer, text):
        texts.append(text)
        assert gate.wait(30)
        return real(tokenizer, text)

    monkeypatch.setattr(Matcher, "of", of)
    yield texts, gate
    gate.set()


async def test_a_grammar_is_compiled_once_for_all_who_want_it(tokenizer, ends, counted):
    texts, _ = counted
    loads = []
    grammars = Grammars(lambda: (loads.append(1), tokenizer)[1])
    guides = await asyncio.gather(*[grammars.guide(TEXTS[number % 2], ends, 0) for number in range(10)])
    guides.append(await grammars.guide(TEXTS[0], ends, 0))
    assert sorted(texts) == sorted(TEXTS[:2]) and len(loads) == 1
    guides[0].take(tokenizer.core.tokenize_str("a"))
    assert guides[0].matcher.complete and not guides[2].matcher.complete  # each has a state of its own


async def test_the_least_recently_used_go(tokenizer, ends, counted):
    texts, _ = counted
    grammars = Grammars(lambda: tokenizer, most=2)
    for text in (TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2], TEXTS[0], TEXTS[1]):
        await grammars.guide(text, ends, 0)
    assert texts == [TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[1]]
    assert grammars.guide_if_ready(TEXTS[1], ends, 0) is not None and grammars.guide_if_ready(TEXTS[2], ends, 0) is None


async def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on(tokenizer, ends, counted):
    _, gate = counted
    gate.clear()
    grammars = Grammars(lambda: tokenizer, longest_s=0.05)
    for text in TEXTS[:3]:
        with pytest.raises(GrammarBroken, match="compiled"):
            await grammars.guide(text, ends, 0)
    gate.set()
    quick = Grammars(lambda: tokenizer)
    await quick.guide(TEXTS[0], ends, 0)


async def test_the_line_is_bounded(tokenizer, ends, counted, monkeypatch):
    _, gate = counted
    gate.clear()
    monkeypatch.setattr(compiled, "_MOST_PENDING", 3)
    grammars = Grammars(lambda: tokenizer)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(grammars.guide(text, ends, 0)) for text in TEXTS[:3]]
        await asyncio.sleep(0)
        with pytest.raises(GrammarsBusy):
            await grammars.guide(TEXTS[3], ends, 0)
        waiting[0].cancel()
        again = tasks.create_task(grammars.guide(TEXTS[0], ends, 0))  # the one that left took nothing away
        await asyncio.sleep(0)
        gate.set()
    assert waiting[0].cancelled() and again.result() and waiting[2].result()


async def test_broken_grammars_are_told_each_time_and_compiled_once(tokenizer, ends, counted):
    texts, _ = counted
    grammars = Grammars(lambda: tokenizer)
    for _ in range(2):
        with pytest.raises(GrammarBroken, match="Expected"):
            await grammars.guide("no grammar", ends, 0)
        assert grammars.guide_if_ready("no grammar", ends, 0) is None
    assert texts == ["no grammar"]


async def test_who_does_not_wait_gets_a_grammar_once_it_is_compiled(tokenizer, ends, counted):
    texts, _ = counted
    grammars = Grammars(lambda: tokenizer)
    assert grammars.guide_if_ready(TEXTS[0], ends, 0) is None
    await grammars.guide(TEXTS[0], ends, 0)
    assert texts == [TEXTS[0]]
    guide = grammars.guide_if_ready(TEXTS[0], ends, 3)
    assert guide is not None and guide.until == 3


async def test_a_tokenizer_that_cannot_be_read_is_tried_again(tokenizer, ends):
    answers = [OSError("gone"), None]

    def load():
        error = answers.pop(0)
        if error:
            raise error
        return tokenizer

    grammars = Grammars(load)
    with pytest.raises(OSError, match="gone"):
        await grammars.guide(TEXTS[0], ends, 0)
    await grammars.guide(TEXTS[0], ends, 0)
