"""Drafts change the number of steps and nothing else."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.checkpoint import inspect, tokenizer_fingerprint
from penstock.draft.drafts import Description
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.sampling.noise import mix
from penstock.engine.speculation.asking import Speculation
from penstock.engine.speculation.draft_model import DraftModel
from penstock.engine.speculation.drafting import draft_misfit, vocabulary_misfit
from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.grammar.joining import standing
from penstock.grammar.matcher import GrammarLeft
from penstock.runtime.drafts import PROPOSERS
from penstock.testing.checkpoints import EOS, TinyModel, write_checkpoint
from penstock.testing.drafters import InlineDrafter, PlainForesight, draft_client, model_drafter, served_drafts


@pytest.fixture
async def plain(config, kit):
    async with Engine.open(config) as engine:
        return await kit.read_all(engine, kit.mixed())


def oracle_drafts(kit, plain):
    """Proposes what plain decoding gave."""
    known = {one.id: [*one.prompt, *answer.ids] for one, answer in zip(kit.mixed(), plain, strict=True)}
    return lambda ask: known[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k]


def drafters(kit, plain):
    perfect = oracle_drafts(kit, plain)

    def sometimes(ask):
        tokens = list(perfect(ask))
        if tokens:
            at = mix(len(ask.tokens)) % (len(tokens) + 1)
            tokens[at : at + 1] = [mix(at) % 320]
        return tokens

    return {
        "perfect": perfect,
        "sometimes wrong": sometimes,
        "random": lambda ask: [mix(len(ask.tokens) * 64 + at) % 320 for at in range(ask.k)],
        "end tokens": lambda ask: [EOS] * ask.k,
        "shifted": lambda ask: [(token + 1) % 320 for token in perfect(ask)],
        "too many": lambda ask: [*perfect(ask), *range(100)],
        "too few": lambda ask: perfect(ask)[:1],
        "no tokens": lambda ask: [-1, 10**9, 3],
        "no such types": lambda ask: ["a", None],
        "silent": lambda ask: [],
    }


KINDS = (
    "perfect",
    "sometimes wrong",
    "random",
    "end tokens",
    "shifted",
    "too many",
    "too few",
    "no tokens",
    "no such types",
    "silent",
)


@pytest.mark.parametrize("kind", KINDS)
async def test_same_tokens_with_any_drafter(config, kit, plain, kind):
    drafter = kit.Drafts(drafters(kit, plain)[kind])
    async with Engine.open(config, drafter) as engine:
        answers = await kit.read_all(engine, kit.mixed())
        for one, other in zip(plain, answers, strict=True):
            kit.assert_same(one, other)
        stats = engine.stats()
        assert stats.free_pages == stats.total_pages
        assert stats.drafted == sum(answer.last.drafts.drafted for answer in answers)
        if kind == "perfect":
            assert stats.accepted == stats.drafted > 0
        if kind in ("shifted", "no tokens", "silent"):
            assert stats.accepted == 0
    assert sorted(drafter.forgotten) == sorted(request.id for request in kit.mixed())


async def test_same_tokens_with_what_was_said_before(config, kit, plain):
    """The second time all answers are known to session and tenant, and nearly all is looked up."""
    named = [replace(one, owner=b"tenant", session=one.id.encode()) for one in kit.mixed()]
    async with Engine.open(replace(config, lookup_tokens=1 << 16)) as engine:
        first, second = await kit.read_all(engine, named), await kit.read_all(engine, named)
        for one, *others in zip(plain, first, second, strict=True):
            for other in others:
                kit.assert_same(one, other)
        assert sum(answer.last.drafts.accepted for answer in second) > sum(len(answer.ids) for answer in second) / 4
        assert engine.stats().drafted == sum(answer.last.drafts.drafted for answer in (*first, *second))


async def test_requests_without_drafts_beside_others_with(config, kit, plain):
    """The same tokens, nothing drafted for them, and nothing guessed from what they said."""
    given = [
        replace(one, sampling=replace(one.sampling, drafts=bool(number % 2)), owner=b"tenant", session=b"one")
        for number, one in enumerate(kit.mixed())
    ]
    drafter = kit.Drafts(oracle_drafts(kit, plain))
    async with Engine.open(replace(config, lookup_tokens=1 << 16), drafter) as engine:
        answers = await kit.read_all(engine, given)
        for one, other in zip(plain, answers, strict=True):
            kit.assert_same(one, other)
        drafted = [answer.last.drafts.drafted for answer in answers]
        assert not any(drafted[::2]) and sum(drafted[1::2]) == engine.stats().drafted > 0
    without = {one.id for one in given[::2]}
    assert without.isdisjoint(drafter.asked) and without.isdisjoint(drafter.forgotten)


async def test_tokens_say_who_proposed_them_where_the_request_asks(config, kit, plain):
    """As many as the account has, by proposer; the tokens stay the same."""
    given = [
        replace(one, sampling=replace(one.sampling, proposers=bool(number % 2)))
        for number, one in enumerate(kit.mixed(logprobs=None))
    ]
    drafter = kit.Drafts(drafters(kit, plain)["sometimes wrong"])
    async with Engine.open(config, drafter) as engine:
        answers = await kit.read_all(engine, given)
    assert [answer.ids for answer in answers] == [one.ids for one in plain]
    for asked, answer in zip(given, answers, strict=True):
        said = [token.proposer for token in answer.tokens]
        if asked.sampling.proposers:
            assert [said.count(name) for name in PROPOSERS] == answer.last.drafts.right
            assert len(said) - said.count("") == answer.last.drafts.accepted > 0
        else:
            assert set(said) == {None}


async def test_an_end_that_was_drafted_is_right(config, kit):
    """Nothing comes behind it, so the last of the drafts is the last token."""
    request = kit.request("a", 12, kit.greedy(12))
    async with Engine.open(config) as engine:
        plain = await kit.read(engine, request)
    end = next(at for at, token in enumerate(plain.ids) if at >= 5 and token not in plain.ids[:at])
    whole = [*request.prompt, *plain.ids]
    drafter = kit.Drafts(lambda ask: whole[len(ask.tokens) : len(ask.tokens) + ask.k])
    sampling = replace(request.sampling, stop_token_ids=frozenset({plain.ids[end]}), proposers=True)
    async with Engine.open(config, drafter) as engine:
        answer = await kit.read(engine, replace(request, sampling=sampling))
        stats = engine.stats()
    assert answer.ids == plain.ids[: end + 1] and answer.last.finish == "stop"
    assert "" not in [token.proposer for token in answer.tokens[1:]]
    assert (answer.last.drafts.accepted, stats.accepted) == (end, end)


def test_a_grammar_that_fails_at_a_guess_costs_no_more_than_the_guess():
    class Failing:
        def legal(self, tokens):
            raise GrammarLeft("no more")

    found = Speculation._legal(None, SimpleNamespace(guide=Failing()), Guess((1, 2), (0.5, 0.5)))
    assert found == NOTHING


@pytest.mark.parametrize("drafts", [False, True])
async def test_nothing_is_looked_up_in_a_text_that_takes_no_part_in_drafts(config, kit, drafts):
    """The same prompt again finds the whole answer, if its text may be looked in."""
    given = replace(kit.request("a", 40, kit.seeded(7)), owner=b"tenant", session=b"one")
    async with Engine.open(replace(config, lookup_tokens=1 << 16)) as engine:
        first = await kit.read(engine, replace(given, sampling=replace(given.sampling, drafts=drafts)))
        again = await kit.read(engine, replace(given, id="b"))
        assert again.ids == first.ids
        assert (again.last.drafts.accepted > len(first.ids) / 2) == drafts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_bad_words_are_never_generated_drafts_or_not(config, kit, temperature):
    """Whoever drafts what is banned, and wherever the sequence moves in between. The words are what is said without
    them, two and three tokens at a time, where that is text."""
    plain = [
        replace(one, sampling=replace(one.sampling, temperature=temperature, logprobs=None)) for one in kit.mixed()
    ]
    async with Engine.open(config) as engine:
        free = await kit.read_all(engine, plain)
        tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))
        said = [tokenizer.decode(answer.ids[at : at + 2 + at % 2]) for answer in free for at in range(len(answer.ids))]
        words = tuple(sorted({word for word in said if word.strip() and "\ufffd" not in word}))[:256]
        assert len(words) > 5
        banned = [replace(one, sampling=replace(one.sampling, bad_words=words)) for one in plain]
        expected = await kit.read_all(engine, banned)
        moved = [replace(one, output=tuple(answer.ids[:7])) for one, answer in zip(banned, expected, strict=True)]
        rest = await kit.read_all(engine, moved)
    assert any(standing(word, tokenizer.decode(answer.ids)) for word in words for answer in free)
    assert not any(standing(word, tokenizer.decode(answer.ids)) for word in words for answer in expected)
    assert [answer.ids[7:] for answer in expected] == [answer.ids for answer in rest]
    for known in (free, expected):
        drafter = kit.Drafts(
            lambda ask, known=known: {
                one.id: [*one.prompt, *answer.ids] for one, answer in zip(plain, known, strict=True)
            }[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k]
        )
        async with Engine.open(config, drafter) as engine:
            assert [answer.ids for answer in await kit.read_all(engine, banned)] == [one.ids for one in expected]
            assert engine.stats().drafted > 0


async def test_rejected_drafts_never_reach_a_sink(config, kit, plain):
    shifted = kit.Drafts(drafters(kit, plain)["sometimes wrong"])
    for request, answer in zip(kit.mixed(), plain, strict=True):
        async with Engine.open(config, shifted) as drafted, Engine.open(config) as undrafted:
            sinks = kit.Sink(), kit.Sink()
            await kit.read(drafted, request, sink=sinks[0])
            await kit.read(undrafted, request, sink=sinks[1])
            assert sinks[0].valid_tokens == sinks[1].valid_tokens
            assert sinks[0].tokens == sinks[1].tokens and len(sinks[0].blocks) == len(sinks[1].blocks)
            blocks = [sinks[0].blocks[number] for number in range(len(request.prompt) // 16)]
            source = kit.Source([sinks[0].blocks[number] for number in sorted(sinks[0].blocks)])
            longer = replace(request, output=tuple(answer.ids[:20]))
            assert (await kit.read(undrafted, longer, source)).ids == answer.ids[20:]
            assert len(blocks) == len(request.prompt) // 16


async def test_drafts_under_page_shortage_and_small_budget(config, kit):
    requests = [kit.request(str(number), 10, kit.seeded(number, 100)) for number in range(6)]
    async with Engine.open(config) as engine:
        expected = await kit.read_all(engine, requests)
    known = {one.id: [*one.prompt, *answer.ids] for one, answer in zip(requests, expected, strict=True)}
    drafter = kit.Drafts(lambda ask: known[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k])
    tight = replace(config, kv_pool_tokens=16 * 12, max_batch_tokens=20, max_running=8, draft_tokens=2)
    async with Engine.open(tight, drafter) as engine:
        for one, other in zip(expected, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(one, other)
        assert engine.stats().preemptions > 0 and engine.stats().accepted > 0


class Absent(InlineDrafter):
    """Never has a draft; says that they are to be expected in so many seconds."""

    def __init__(self, expected_s):
        super().__init__(lambda ask: ())
        self.expected_s = expected_s
        self.waits = 0

    def expected(self, id, count=1):
        return self.expected_s

    async def arrived(self):
        self.waits += 1
        await super().arrived()


class Eager(Absent):
    """Something comes all the time, but never a draft that is wanted."""

    async def arrived(self):
        self.waits += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("drafter", [Absent(0.0), Absent(0.0005), Absent(60.0), Absent(math.inf), Eager(0.0005)])
async def test_dead_and_slow_drafters_are_left_alone(config, kit, plain, drafter):
    """A step waits as long as drafts are expected to take, if that is less than its limit; else not at all."""
    async with Engine.open(replace(config, draft_timeout_s=0.01), drafter) as engine:
        for one, other in zip(plain, await kit.read_all(engine, kit.mixed()), strict=True):
            kit.assert_same(one, other)
        stats = engine.stats()
    assert stats.drafted == 0
    if drafter.expected_s == 0.0005:
        assert 0 < stats.draft_failures <= drafter.waits
    else:
        assert stats.draft_failures == drafter.waits == 0


async def test_hopeless_drafts_are_rarely_verified(config, kit):
    drafter = kit.Drafts(lambda ask: [300 + len(ask.tokens) % 7] * ask.k)
    async with Engine.open(replace(config, draft_always=False, draft_tokens=4), drafter) as engine:
        await kit.read(engine, kit.request("a", 10, kit.greedy(200, logit_bias={9: 100.0})))
        assert engine.stats().accepted == 0 and engine.stats().drafted < 80


async def test_no_draft_past_max_tokens(config, kit):
    asked = []

    def propose(ask):
        if ask.k:
            asked.append(len(ask.tokens) + ask.k)
        return [7] * ask.k

    async with Engine.open(config, kit.Drafts(propose)) as engine:
        await kit.read(engine, kit.request("a", 10, kit.greedy(6, logit_bias={7: 100.0})))
        assert asked == [15], "one step: four drafts and one more"
        await kit.read(engine, kit.request("a", 10, kit.greedy(1)))
        assert len(asked) == 1


@pytest.mark.parametrize("kind", ["same model", "other model"])
async def test_a_draft_model_over_the_wire(config, kit, plain, tiny, tmp_path, kind):
    other = write_checkpoint(tmp_path / "draft", TinyModel(layers=1, seed=5))
    model = DraftModel(EngineConfig(model=tiny if kind == "same model" else other, max_batch_tokens=64))
    async with model_drafter(model) as drafter, Engine.open(config, drafter) as engine:
        for one, other in zip(plain, await kit.read_all(engine, kit.mixed()), strict=True):
            kit.assert_same(one, other)
        stats = engine.stats()
        assert stats.drafted > 50
        if kind == "same model":
            assert stats.accepted > 0.95 * stats.drafted, "the model agrees with itself, sampled and penalised or not"
            assert stats.draft_failures == 0
    left = model.stats()
    assert left.sequences == 0 and left.free_pages == 2048


class Late(PlainForesight):
    """Right, but nothing comes before the engine has made two more steps, or rests; then all that is wanted."""

    engine = None

    def step(self):
        begun = self.engine.stats().steps
        while self.engine.stats().running and self.engine.stats().steps < begun + 2:
            time.sleep(0.0005)
        made = super().step()
        while (more := super().step()).worked:
            made.leads.extend(more.leads)
        return made


async def test_a_draft_service_that_is_always_late(config, kit, plain, tiny):
    """It is ahead all the same: what it guesses late is still of use when the text has come so far."""
    texts = [[*one.prompt, *answer.ids] for one, answer in zip(kit.mixed(), plain, strict=True)]

    def right(text):
        return next((whole[len(text)] for whole in texts if whole[: len(text)] == text and len(whole) > len(text)), 7)

    late, target = Late(right), inspect(tiny)
    description = Description(tokenizer_fingerprint(target), dict)
    async with served_drafts(late, description) as (server, _), draft_client(server.port, target) as client:
        async with Engine.open(replace(config, draft_timeout_s=0.01), client) as engine:
            late.engine = engine
            await client.connected.wait()
            for one, other in zip(plain, await kit.read_all(engine, kit.mixed()), strict=True):
                kit.assert_same(one, other)
            assert engine.stats().accepted > 0


def test_draft_misfit(tiny, tmp_path):
    same = inspect(write_checkpoint(tmp_path / "same", TinyModel(layers=1)))
    assert draft_misfit(inspect(tiny), same) is None
    file = tmp_path / "same" / "tokenizer.json"
    file.write_text(file.read_text().replace("  ", " "))
    assert draft_misfit(inspect(tiny), same) is None, "other bytes, same vocabulary"
    file.write_text(file.read_text().replace("<|im_end|>", "<|end|>"))
    assert draft_misfit(inspect(tiny), same) == "'<|end|>' is token 259 of the draft and none of the target"


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=9), st.data())
def test_a_part_of_a_vocabulary_fits(target, data):
    """With the same ids; each other id is named."""
    kept = data.draw(st.sets(st.sampled_from(sorted(target)))) if target else set()
    draft = {text: target[text] for text in kept}
    assert (vocabulary_misfit(target, draft) is None) == bool(draft)
    if kept:
        wrong = data.draw(st.sampled_from(sorted(kept)))
        reason = vocabulary_misfit(target, draft | {wrong: 10})
        assert reason == f"{wrong!r} is token 10 of the draft and {target[wrong]} of the target"
