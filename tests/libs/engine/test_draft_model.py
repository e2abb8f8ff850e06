"""The draft model runs ahead: whatever it is told and when, what it guesses is what it would guess from that text."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.hooks import DraftTerms
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.noise import mix
from penstock.engine.speculation.draft_model import DraftModel
from penstock.engine.speculation.leads import DraftTold
from penstock.testing.checkpoints import EOS

VOCAB = 320
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
PENALISED = replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logit_bias={5: 2.0})
BANNED = replace(GREEDY, banned_token_ids=frozenset(range(0, VOCAB, 2)), min_tokens=50, ignore_eos=False)
SAMPLINGS = [GREEDY, SEEDED, PENALISED, BANNED]


def text(number, length):
    return [mix(number * 1000 + at) % 256 for at in range(length)]


class Kept:
    """A store in a dictionary, the plain form of a DraftKv: it answers when it is told to."""

    def __init__(self, blocks=()):
        self.blocks = dict(blocks)
        self.lacking, self.full = [], []
        self.pages = set()
        """Keys of the blocks that are in the model's pages."""

    def hear(self, news):
        self.lacking += news.lacking
        self.full += news.full
        for key, move in news.moves:
            assert (move == "named") == (key not in self.pages)
            (self.pages.discard if move == "forgotten" else self.pages.add)(key)

    def answer(self, model):
        """Whether there was anything to answer to."""
        lacking, self.lacking = self.lacking, []
        full, self.full = self.full, []
        for blocks in full:
            for key, page in zip(blocks.keys, blocks.pages, strict=True):
                self.blocks[key] = bytes(model.memory.view(page))
            model.give_back(blocks)
        for blocks in lacking:
            found = list(takewhile(lambda block: block is not None, map(self.blocks.get, blocks.keys)))
            model.memory.write(blocks.pages[: len(found)], [memoryview(block) for block in found])
            model.stored(blocks, len(found))
        return bool(lacking or full)


class Worker:
    """What a decode worker does: tells how its sequences go on, and keeps the drafts at hand."""

    def __init__(self, model, kept=None):
        self.model = model
        self.kept = kept
        self.texts = {}
        self.leads = {}
        """By sequence: (after, length, tokens)."""
        self.refused = set()
        self.number = 0

    def tell(self, id, tokens, k, sampling=GREEDY, prompt=None, owner=b""):
        known = self.texts.get(id, [])
        keep = next((at for at, pair in enumerate(zip(known, tokens, strict=False)) if pair[0] != pair[1]), len(known))
        keep = min(keep, len(tokens))
        self.number += 1
        stops = frozenset() if sampling.ignore_eos else frozenset({EOS})
        terms = DraftTerms(sampling, len(tokens) if prompt is None else prompt, stops, owner)
        told = DraftTold((1, id), self.number, keep, list(tokens)[keep:], k, None if id in self.texts else terms)
        self.texts[id] = list(tokens)
        self.model.tell(told)

    def step(self):
        made = self.model.step()
        if self.kept is not None:
            self.kept.hear(made.blocks)
        for lead in made.leads:
            after, length, tokens = self.leads.get(lead.id[1], (0, 0, []))
            if lead.after == after:
                assert lead.length == length + len(tokens), "without gaps"
                tokens.extend(lead.tokens)
            else:
                assert lead.after > after
                self.leads[lead.id[1]] = lead.after, lead.length, list(lead.tokens)
            self.refused.discard(lead.id[1])
        self.refused |= {id for _, id in made.refused}
        return made.worked

    def rest(self):
        """Steps until there is nothing to do; returns how many."""
        count = 0
        while self.step() or (self.kept is not None and self.kept.answer(self.model)):
            count += 1
            assert count < 1000
        return count

    def ahead(self, id):
        """The drafts behind what was told last."""
        _, length, tokens = self.leads.get(id, (0, 0, []))
        told = self.texts[id]
        same = tokens[: max(0, len(told) - length)] == told[length:]
        return tokens[len(told) - length :] if same and length <= len(told) else []

    def forget(self, id):
        self.model.forget((1, id))
        for kept in (self.texts, self.leads):
            kept.pop(id, None)


@pytest.fixture(scope="module")
def fresh(tiny):
    return DraftModel(EngineConfig(model=tiny))


def naive(fresh, tokens, k, sampling, prompt):
    """What is guessed from the text alone."""
    fresh.clear()
    worker = Worker(fresh)
    worker.tell(1, tokens, k, sampling, prompt)
    worker.rest()
    return worker.ahead(1)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_guesses_are_those_of_the_text_whatever_was_told_before(tiny, fresh, data):
    """Several sequences; texts that go on as guessed, or otherwise, or further, or from an earlier place; steps in
    between or none; with room for few in a step; with a store, that answers soon or late, or without."""
    kept = data.draw(st.sampled_from([None, Kept()]))
    config = EngineConfig(model=tiny, kv_pool_tokens=8192, max_batch_tokens=24, max_running=3)
    model = DraftModel(config, stores=kept is not None)
    worker, prompts = Worker(model, kept), {}
    samplings = data.draw(st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=5))
    for id, sampling in enumerate(samplings):
        prompts[id] = data.draw(st.integers(1, 90))
        worker.tell(id, text(id % 3, prompts[id]), data.draw(st.integers(0, 5)), sampling, owner=b"somebody")
    for _ in range(data.draw(st.integers(0, 12))):
        for _ in range(data.draw(st.integers(0, 4))):
            worker.step()
        if kept is not None and data.draw(st.booleans()):
            kept.answer(model)
        id = data.draw(st.sampled_from(sorted(worker.texts)))
        told, ahead = worker.texts[id], worker.ahead(id)
        right = ahead[: data.draw(st.integers(0, 6))]
        more = data.draw(st.lists(st.integers(0, 255), max_size=3))
        keep = data.draw(st.sampled_from([len(told), len(told), max(prompts[id], len(told) - 4)]))
        now = [*told, *right, *more] if keep == len(told) else [*told[:keep], *more]
        worker.tell(id, now, data.draw(st.integers(0, 6)), samplings[id], prompts[id])
    wanted = {id: data.draw(st.integers(1, 6)) for id in worker.texts}
    for id, k in wanted.items():
        worker.tell(id, worker.texts[id], k, samplings[id], prompts[id])
    worker.rest()
    for id, k in wanted.items():
        expected = naive(fresh, worker.texts[id], k, samplings[id], prompts[id])
        assert worker.ahead(id)[:k] == expected, "no more, no less, no other"
        assert len(expected) == k
    for id in list(worker.texts):
        worker.forget(id)
    assert model.stats().free_pages == 512 and model.stats().sequences == 0


def test_it_goes_on_from_its_own_guesses_without_computing_them_again(tiny):
    worker, rows = Worker(DraftModel(EngineConfig(model=tiny))), counted(DraftModel(EngineConfig(model=tiny)))
    worker.model = rows.model
    worker.tell(1, text(1, 20), 5)
    assert worker.rest() == 5 and sum(rows.steps) == 24
    guesses = worker.ahead(1)
    rows.steps.clear()
    worker.tell(1, [*text(1, 20), *guesses[:3]], 5)
    assert worker.ahead(1) == guesses[3:], "there already"
    assert worker.rest() == 3 and rows.steps == [1, 1, 1]
    assert worker.model.stats().dropped == 0
    more = worker.ahead(1)
    worker.tell(1, [*text(1, 20), *guesses[:3], more[0], (more[1] + 1) % 256], 2)
    rows.steps.clear()
    assert worker.ahead(1) == [] and worker.rest() == 2
    assert rows.steps == [1, 1], "all before the difference is computed"
    assert worker.model.stats().dropped == 4


def test_what_is_dropped_of_an_owner_is_computed_again_and_nothing_else(tiny):
    rows = counted(DraftModel(EngineConfig(model=tiny)))
    worker, dropped, stays, tokens = Worker(rows.model), b"a" * 16, b"b" * 16, text(1, 5 * 16 + 3)

    def computed(id, owner):
        rows.steps.clear()
        worker.tell(id, tokens, 1, owner=owner)
        worker.rest()
        worker.forget(id)
        return sum(rows.steps)

    assert (computed(1, dropped), computed(2, stays)) == (len(tokens), len(tokens))
    worker.tell(3, tokens, 1, owner=dropped)
    worker.rest()
    found = rows.model.drop(dropped)
    assert (found.blocks, found.in_use, found.bytes) == (5, 5, 5 * rows.model.spec.block_bytes)
    worker.forget(3)
    assert computed(4, stays) == 3, "that of others stays"
    assert computed(5, dropped) == len(tokens)
    assert rows.model.drop(b"c" * 16).blocks == 0
    assert rows.model.stats().free_pages == rows.model.stats().pages


class counted:
    """A model of which it is known how many tokens each step computed."""

    def __init__(self, model):
        self.model, self.steps = model, []
        real = model._runner.step
        model._runner.step = lambda runs: self.steps.append(sum(run.tokens for run in runs)) or real(runs)


def test_guesses_of_two_milliseconds_are_handed_out_together(tiny):
    """And at once when there are as many as are wanted."""
    now = [0.0]
    worker = Worker(DraftModel(EngineConfig(model=tiny), lambda: now[0]))
    real, seen = worker.model._runner.step, []

    def step(runs):
        now[0] += 0.0007
        return real(runs)

    worker.model._runner.step = step
    worker.tell(1, text(1, 20), 9)
    while worker.step():
        seen.append(len(worker.ahead(1)))
    assert seen == [0, 0, 3, 3, 3, 6, 6, 6, 9]
    worker.tell(1, [*text(1, 20), *worker.ahead(1)], 1)
    worker.step()
    assert len(worker.ahead(1)) == 1


def test_a_prompt_is_computed_before_drafts_are_wanted(tiny):
    rows = counted(DraftModel(EngineConfig(model=tiny)))
    worker = Worker(rows.model)
    worker.tell(1, text(1, 700), 0)
    assert worker.rest() and sum(rows.steps) == 699 and not worker.leads
    worker.tell(1, text(1, 700), 1)
    assert worker.rest() == 1 and rows.steps[-1] == 1 and len(worker.ahead(1)) == 1


def test_the_next_turn_of_a_session_computes_what_is_new(tiny):
    """Full blocks that were computed before are used again, for their owner alone, while nobody needs their room."""
    rows = counted(DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 62)))
    worker = Worker(rows.model)

    def computed(id, tokens, owner=b""):
        rows.steps.clear()
        worker.tell(id, tokens, 1, owner=owner)
        worker.rest()
        return sum(rows.steps)

    first, other = text(1, 320), text(2, 100)
    assert computed(1, first) == 320
    assert computed(2, [*first, *other]) == 100, "beside the first"
    for id in (1, 2):
        worker.forget(id)
    assert rows.model.stats().free_pages == 62
    assert computed(3, first) == 16, "the last token is always computed, with its block"
    assert computed(4, [*first, *other, 7]) == 420 - 416 + 1
    for id in (3, 4):
        worker.forget(id)
    assert computed(5, first, b"another") == 320
    assert computed(6, [*first[:100], 999 % 256, *first[101:]]) == 320 - 96
    for id in (5, 6):
        worker.forget(id)
    assert computed(7, text(3, 980)) == 980, "it needs all pages"
    worker.forget(7)
    assert computed(8, first) == 320 and worker.ahead(8) == naive_of(tiny, first)


def naive_of(tiny, tokens):
    return naive(DraftModel(EngineConfig(model=tiny)), tokens, 1, GREEDY, len(tokens))


def test_what_the_store_has_is_not_computed(tiny):
    """By another model with the same weights, for the same owner; the last token always is."""
    first = Worker(DraftModel(EngineConfig(model=tiny), stores=True), Kept())
    first.tell(1, text(1, 330), 4, owner=b"one")
    first.rest()
    assert len(first.kept.blocks) == 20 and first.model.stats().computed == 330
    answer = first.ahead(1)
    first.tell(1, [*text(1, 330), *answer, *text(2, 50)], 0, owner=b"one")
    first.rest()
    assert len(first.kept.blocks) == 23, "of what was told, not of guesses"

    def counts(owner, tokens):
        rows = counted(DraftModel(EngineConfig(model=tiny), stores=True))
        worker = Worker(rows.model, Kept(first.kept.blocks))
        worker.tell(1, tokens, 2, owner=owner)
        worker.rest()
        assert worker.ahead(1) == naive(DraftModel(EngineConfig(model=tiny)), tokens, 2, GREEDY, len(tokens))
        stats = rows.model.stats()
        assert stats.computed == sum(rows.steps) - 1, "but for a guess"
        return stats.computed, stats.fetched

    assert counts(b"one", [*text(1, 330), *answer, *text(2, 60)]) == (394 - 368, 368)
    assert counts(b"one", text(1, 320)) == (16, 304)
    assert counts(b"two", text(1, 330)) == (330, 0)
    assert counts(b"", text(1, 330)) == (330, 0)
    assert counts(b"one", [9, *text(1, 330)]) == (331, 0)
    assert counts(b"one", text(1, 60)) == (60, 0), "too short to ask"


def test_others_are_served_while_a_text_waits_for_its_blocks(tiny):
    worker = Worker(DraftModel(EngineConfig(model=tiny), stores=True), Kept())
    worker.tell(1, text(1, 200), 3, owner=b"one")
    worker.tell(2, text(2, 30), 3, owner=b"one")
    while worker.step():
        pass
    assert len(worker.ahead(2)) == 3 and not worker.ahead(1)
    assert [len(blocks.keys) for blocks in worker.kept.lacking] == [12]
    worker.tell(1, [*text(1, 200), 5], 3, owner=b"one")
    worker.kept.answer(worker.model)
    worker.rest()
    assert worker.ahead(1) == naive(DraftModel(EngineConfig(model=tiny)), worker.texts[1], 3, GREEDY, 200)


def test_pages_are_held_until_they_are_given_back(tiny):
    """A text that is gone, or lost its room, frees only what nobody writes to or reads."""
    model = DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 20, max_model_len=320), stores=True)
    worker = Worker(model, Kept())
    worker.tell(1, text(1, 100), 4, owner=b"one")
    worker.step()
    assert len(worker.kept.lacking) == 1
    worker.forget(1)
    assert model.stats().free_pages == 14
    worker.tell(2, text(2, 300), 4, owner=b"one")
    worker.step()
    assert worker.refused == {2}
    worker.kept.answer(model)
    assert model.stats().free_pages == 20
    worker.rest()
    assert worker.ahead(2) == naive(DraftModel(EngineConfig(model=tiny)), text(2, 300), 4, GREEDY, 300)
    model.clear()
    worker.kept.answer(model)
    assert model.stats().free_pages == 20


def test_pages_that_several_share_are_no_room_for_an_older_one(tiny):
    """What two younger texts share can't be counted twice."""
    worker = Worker(DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 20, max_model_len=320)))
    for id, length in ((0, 28), (1, 40)):
        worker.tell(id, text(id, length), 4)
        worker.rest()
    for id in (2, 3):
        worker.tell(id, text(2, 165), 4)
        worker.rest()
    assert worker.model.stats().free_pages == 20 - 2 - 3 - 11 - 1
    worker.tell(1, text(1, 290), 4)
    worker.rest()
    assert worker.refused == {1} and worker.model.stats().evicted == 0, "without both of them 15 would be free, not 16"
    worker.tell(0, text(0, 190), 4)
    worker.rest()
    assert worker.refused == {1, 2, 3}
    assert worker.ahead(0) == naive(DraftModel(EngineConfig(model=tiny)), text(0, 190), 4, GREEDY, 190)


def test_nobody_writes_where_others_read(tiny):
    """A text that is told again from an earlier place leaves the blocks of another as they are."""
    worker = Worker(DraftModel(EngineConfig(model=tiny)))
    worker.tell(1, text(1, 64), 3)
    worker.rest()
    worker.tell(2, text(1, 64), 3)
    worker.rest()
    worker.tell(2, [*text(1, 20), 9, 9], 3)
    worker.rest()
    assert worker.ahead(2) == naive(DraftModel(EngineConfig(model=tiny)), worker.texts[2], 3, GREEDY, 64)
    worker.tell(1, [*text(1, 64), 8], 3)
    worker.rest()
    assert worker.ahead(1) == naive(DraftModel(EngineConfig(model=tiny)), worker.texts[1], 3, GREEDY, 64)


def test_a_long_prompt_does_not_hold_the_others(tiny):
    """It is computed in slices beside them, which take 4 ms; alone, it has 20 ms. Long ones take turns."""
    now = [0.0]
    rows = counted(DraftModel(EngineConfig(model=tiny), lambda: now[0]))
    real = rows.model._runner.step

    def step(runs):
        now[0] += sum(run.tokens for run in runs) * 0.0001
        return real(runs)

    rows.model._runner.step = step
    worker = Worker(rows.model)
    worker.tell(99, text(99, 500), 0)
    worker.rest()
    assert rows.steps == [64, 200, 200, 35]
    for id in range(4):
        worker.tell(id, text(id, 10), 30)
    worker.step()
    for id in range(10, 12):
        worker.tell(id, text(id, 600), 1)
    seen = [worker.ahead(0)]
    for _ in range(15):
        worker.step()
        seen.append(list(worker.ahead(0)))
    assert [len(drafts) for drafts in seen] == list(range(1, 17)), "one more in every step"
    assert rows.steps[-15:] == [4 + 40] * 15
    computed = [sequence.computed for sequence in worker.model._sequences.values() if len(sequence.tokens) >= 600]
    assert computed == [8 * 40, 7 * 40]
    worker.rest()
    assert all(worker.ahead(id) for id in (10, 11))


def test_more_sequences_than_a_step_takes_are_served_in_turn(tiny):
    worker = Worker(DraftModel(EngineConfig(model=tiny, max_running=3, max_batch_tokens=48)))
    for id in range(7):
        worker.tell(id, text(id, 5), 8)
    worker.tell(9, text(9, 200), 8)
    for _ in range(40):
        worker.step()
        lengths = [len(worker.ahead(id)) for id in range(7)]
        assert max(lengths) - min(lengths) <= 1 or max(lengths) == 8
    assert len(worker.ahead(9)) == 8 and min(lengths) == 8


@pytest.mark.parametrize("most", [1, 3])
def test_a_tenant_with_many_sequences_leaves_the_others_their_turns(tiny, most):
    worker = Worker(DraftModel(EngineConfig(model=tiny, max_running=most)))
    for id in range(10):
        worker.tell(id, text(id, 5), 60, owner=b"flood")
    worker.tell(10, text(10, 5), 10, owner=b"other")
    while len(worker.ahead(10)) < 10:
        worker.step()
        alone = len(worker.ahead(10))
        theirs = sum(len(worker.ahead(id)) for id in range(10))
        assert theirs <= max(1, most - 1) * (alone + 2), "the other one has a place in every step, or in every second"


def test_a_tenant_with_many_sequences_leaves_the_others_room(tiny):
    worker = Worker(DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 12)))
    for id in range(1, 5):
        worker.tell(id, text(id, 40), 4, owner=b"flood")
    worker.rest()
    assert all(len(worker.ahead(id)) == 4 for id in range(1, 5)), "nobody else is there"
    worker.tell(5, text(5, 40), 4, owner=b"other")
    worker.rest()
    assert len(worker.ahead(5)) == 4 and worker.refused == {4}
    worker.tell(6, text(6, 40), 4, owner=b"other")
    worker.rest()
    assert len(worker.ahead(6)) == 4 and worker.refused == {4, 3}
    worker.tell(7, text(7, 40), 4, owner=b"other")
    worker.rest()
    assert worker.refused == {4, 3, 7}, "no more than the others"


def test_the_younger_of_two_long_sequences_gets_no_drafts_until_there_is_room(tiny):
    """They do not take each other's pages at every step."""
    worker = Worker(DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 20, max_model_len=320)))
    worker.tell(1, text(1, 200), 4)
    worker.tell(2, text(2, 150), 4)
    worker.rest()
    assert len(worker.ahead(1)) == 4 and worker.refused == {2}
    for _ in range(20):
        for id in (1, 2):
            worker.tell(id, [*worker.texts[id], *(worker.ahead(id)[:2] or [7])], 4)
        worker.rest()
        assert len(worker.ahead(1)) == 4 and not worker.ahead(2)
    assert worker.model.stats().refused == 1 and worker.model.stats().evicted == 0
    worker.forget(1)
    worker.rest()
    assert len(worker.ahead(2)) == 4 and not worker.refused


def test_an_older_sequence_that_grows_takes_the_pages_of_the_youngest(tiny):
    worker = Worker(DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 12)))
    for id in (1, 2, 3):
        worker.tell(id, text(id, 40), 4)
    worker.rest()
    assert all(len(worker.ahead(id)) == 4 for id in (1, 2, 3))
    worker.tell(1, text(1, 100), 4)
    worker.rest()
    assert worker.refused == {3} and worker.model.stats().evicted == 1
    assert [len(worker.ahead(id)) for id in (1, 2)] == [4, 4]


def test_sequences_that_want_nothing_give_way_after_a_while(tiny):
    now = [0.0]
    worker = Worker(DraftModel(EngineConfig(model=tiny, kv_pool_tokens=16 * 12), lambda: now[0]))
    worker.tell(1, text(1, 120), 0)
    worker.tell(2, text(2, 100), 4)
    worker.rest()
    assert worker.refused == {2}
    now[0] = 10.0
    worker.rest()
    assert len(worker.ahead(2)) == 4 and worker.refused == {1}
    worker.tell(1, text(1, 120), 4)
    worker.rest()
    assert len(worker.ahead(1)) == 4 and worker.refused == {2}, "it is older, and wants some again"


def test_texts_that_are_too_long_or_strange_get_no_drafts(tiny):
    worker = Worker(DraftModel(EngineConfig(model=tiny, max_model_len=60)))
    worker.tell(1, text(1, 57), 9)
    worker.tell(2, [1, 2, 5000], 3)
    worker.tell(3, text(3, 60), 3)
    worker.tell(4, [1, 2], 3)
    worker.rest()
    assert [len(worker.ahead(id)) for id in (1, 2, 3, 4)] == [3, 0, 0, 3]
    assert worker.refused == {2, 3}
    worker.tell(4, [1, 2, 5000], 3)
    worker.tell(2, [1, 2, 5000, 4], 3)
    worker.rest()
    assert not worker.ahead(4) and not worker.ahead(2) and worker.refused == {2, 3, 4}


def test_terms_with_tokens_that_the_draft_does_not_know(tiny):
    sampling = replace(BANNED, logit_bias={5000: 3.0, 7: 1.0}, banned_token_ids=frozenset({9999, 3}))
    worker = Worker(DraftModel(EngineConfig(model=tiny)))
    worker.tell(1, text(1, 20), 4, sampling)
    worker.rest()
    assert len(worker.ahead(1)) == 4


def test_a_guess_that_ends_the_text_is_the_last(tiny):
    ends = SamplingParams(max_tokens=100, temperature=0.0, logit_bias={EOS: 100.0})
    worker = Worker(DraftModel(EngineConfig(model=tiny)))
    worker.tell(1, text(1, 20), 4, ends)
    assert worker.rest() == 1 and worker.ahead(1) == [EOS]
    worker.tell(1, [*text(1, 20), 5], 4)
    worker.rest()
    assert worker.ahead(1) == [EOS], "and again where the text went on"
    late = replace(ends, min_tokens=3)
    worker.tell(2, text(2, 20), 8, late)
    worker.rest()
    assert worker.ahead(2)[3:] == [EOS] and EOS not in worker.ahead(2)[:3]


def test_a_sequence_that_fails_fails_alone(tiny):
    """What can't be computed is not tried again."""
    model = DraftModel(EngineConfig(model=tiny))
    real, worker = model._runner.step, Worker(model)

    def step(runs):
        if any(run.choice.tokens[0] == 99 for run in runs):
            raise EngineError("damaged")
        return real(runs)

    model._runner.step = step
    for id in range(6):
        worker.tell(id, [99 if id == 2 else 1, *text(id, 10)], 3)
    worker.rest()
    assert worker.refused == {2} and all(len(worker.ahead(id)) == 3 for id in (0, 1, 3, 4, 5))
    worker.tell(2, [*worker.texts[2], 5], 3)
    assert worker.rest() == 0


def test_a_sequence_that_was_never_begun_is_left_alone(tiny):
    model = DraftModel(EngineConfig(model=tiny))
    model.tell(DraftTold((1, 1), 1, 5, [1, 2], 3))
    model.forget((1, 2))
    assert not model.step().worked and model.stats().sequences == 0


def test_random_lives_leave_no_page(tiny):
    """Sequences come, grow, rest and end in a pool that is too small for all."""
    luck, now = random.Random(3), [0.0]
    model = DraftModel(
        EngineConfig(model=tiny, kv_pool_tokens=16 * 30, max_batch_tokens=40, max_running=4), lambda: now[0]
    )
    worker = Worker(model)
    for turn in range(300):
        now[0] += luck.random()
        id = luck.randrange(12)
        if id in worker.texts and luck.random() < 0.2:
            worker.forget(id)
        else:
            before = worker.texts.get(id) or text(turn, luck.randrange(1, 120))
            right = worker.ahead(id) if id in worker.texts else []
            worker.tell(id, [*before, *right[: luck.randrange(5)], *text(turn, luck.randrange(3))], luck.randrange(5))
        for _ in range(luck.randrange(3)):
            worker.step()
        held = sum(len(sequence.pages) for sequence in model._sequences.values())
        assert model.stats().free_pages == 30 - held
    assert model.stats().evicted and model.stats().refused
    model.clear()
    assert model.stats().free_pages == 30
