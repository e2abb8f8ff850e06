"""Drafts change the number of steps and nothing else."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.hooks import DraftAsk
from penstock.engine.sampling.noise import mix
from penstock.engine.scheduling.live import new_live
from penstock.engine.speculation.appetite import Appetite
from penstock.engine.speculation.asking import Speculation
from penstock.engine.speculation.draft_model import ModelProposer
from penstock.engine.speculation.drafting import NgramProposer, draft_misfit
from penstock.engine.stats import Counters
from penstock.grammar.joining import standing
from penstock.testing.checkpoints import EOS, TinyModel, write_checkpoint
from penstock.testing.drafters import InlineDrafter, thread_drafter


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
        assert stats.drafted == sum(answer.last.drafted for answer in answers)
        if kind == "perfect":
            assert stats.accepted == stats.drafted > 0
        if kind in ("shifted", "no tokens", "silent"):
            assert stats.accepted == 0
    assert sorted(drafter.forgotten) == sorted(request.id for request in kit.mixed())


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


async def test_dead_and_slow_drafters_are_left_alone(config, kit, plain, caplog):
    caplog.set_level(logging.INFO)

    class Dying:
        asked = 0

        async def propose(self, asks):
            self.asked += 1
            raise ConnectionError("gone")

        def forget(self, id):
            raise ConnectionError("gone")

    class Sleeping(Dying):
        async def propose(self, asks):
            self.asked += 1
            await asyncio.Event().wait()

    class Cancelled(Dying):
        async def propose(self, asks):
            """What a stream that was torn down raises."""
            self.asked += 1
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    for drafter in (Dying(), Sleeping(), Cancelled()):
        async with Engine.open(replace(config, draft_timeout_s=0.01), drafter) as engine:
            for one, other in zip(plain, await kit.read_all(engine, kit.mixed()), strict=True):
                kit.assert_same(one, other)
            assert engine.stats().draft_failures == drafter.asked
            assert 2 <= drafter.asked <= 6, "the pauses double"
        said = [
            record.levelname for record in caplog.records if "drafter" in record.message and "asked" in record.message
        ]
        assert said == (["INFO"] if isinstance(drafter, Sleeping) else ["WARNING"])
        caplog.clear()


async def test_a_busy_drafter_is_logged_once_per_change_of_state(config, caplog, kit):
    class Busy:
        """In time, or not, as the test says."""

        late = True

        async def propose(self, asks):
            if self.late:
                raise TimeoutError
            return {}

        def forget(self, id):
            pass

    drafter, counters = Busy(), Counters()
    speculation = Speculation(config, 320, drafter, counters)
    live = new_live(kit.request("a", 2, kit.greedy(100)), 1, frozenset())

    async def steps(count):
        for _ in range(count):
            speculation.begin(live)
            await speculation.ask([live])

    with caplog.at_level(logging.INFO):
        await steps(3000)
        for _ in range(20):  # late now and then
            drafter.late = False
            await steps(30)
            drafter.late = True
            await steps(5)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        drafter.late = False
        await steps(400)
        drafter.late = True
        await steps(10)
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3, "late is no warning"
    assert counters.draft_failures > 20


def test_appetite_follows_success():
    hopeful, hopeless, middling = Appetite(), Appetite(), Appetite()
    for _ in range(50):
        if wanted := hopeful.wanted(7):
            hopeful.learn(wanted, wanted)
        if wanted := hopeless.wanted(7):
            hopeless.learn(wanted, 0)
        if wanted := middling.wanted(7):
            middling.learn(wanted, min(1, wanted - 1))
    assert hopeful.wanted(7) == 7 and hopeful.wanted(0) == 0
    assert middling.wanted(7) in (2, 3)
    trials = [hopeless.wanted(7) for _ in range(17)]
    assert sorted(trials)[-2:] in ([0, 2], [2, 2])
    for _ in range(20):
        if wanted := hopeless.wanted(7):
            hopeless.learn(wanted, wanted)
    assert hopeless.wanted(7) > 2, "and comes back"


async def test_hopeless_drafts_are_rarely_verified(config, kit):
    drafter = kit.Drafts(lambda ask: [300 + len(ask.tokens) % 7] * ask.k)
    async with Engine.open(config, drafter) as engine:
        await kit.read(engine, kit.request("a", 10, kit.greedy(200, logit_bias={9: 100.0})))
        assert engine.stats().accepted == 0 and engine.stats().drafted < 80


async def test_no_draft_past_max_tokens(config, kit):
    asked = []

    def propose(ask):
        asked.append(len(ask.tokens) + ask.k)
        return [7] * ask.k

    async with Engine.open(config, kit.Drafts(propose)) as engine:
        await kit.read(engine, kit.request("a", 10, kit.greedy(6, logit_bias={7: 100.0})))
        assert asked == [15], "one step: four drafts and one more"
        await kit.read(engine, kit.request("a", 10, kit.greedy(1)))
        assert len(asked) == 1


@pytest.mark.parametrize("kind", ["model", "ngram", "other model"])
async def test_the_real_proposers(config, kit, plain, tiny, tmp_path, kind):
    if kind == "ngram":
        proposer = NgramProposer()
    elif kind == "model":
        proposer = ModelProposer(EngineConfig(model=tiny, max_batch_tokens=64))
    else:
        proposer = ModelProposer(EngineConfig(model=write_checkpoint(tmp_path / "draft", TinyModel(layers=1, seed=5))))
    with thread_drafter(proposer) as threaded:
        drafter = InlineDrafter(proposer) if kind == "ngram" else threaded
        async with Engine.open(config, drafter) as engine:
            for one, other in zip(plain, await kit.read_all(engine, kit.mixed()), strict=True):
                kit.assert_same(one, other)
            stats = engine.stats()
            if kind == "model":
                assert stats.accepted > 0.9 * stats.drafted > 0, "the model agrees with itself, sampled or not"
    if kind != "ngram":
        left = proposer.stats()
        assert left.sequences == 0 and left.free_pages == 2048


def ask_of(id, tokens, k=4, **fields):
    values = {"seed": 3, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
    return DraftAsk(id, tokens, k, **values)


def test_model_proposer_keeps_common_prefixes(tiny):
    fresh, kept = ModelProposer(EngineConfig(model=tiny)), ModelProposer(EngineConfig(model=tiny))
    tokens = [mix(at) % 256 for at in range(100)]
    for cut, more in [(100, []), (97, [1, 2, 3]), (50, [9]), (100, [5] * 30), (1, [])]:
        now = [*tokens[:cut], *more]
        for temperature in (0.0, 0.8):
            expected = fresh.propose([ask_of("a", now, temperature=temperature)])
            fresh.forget("a")
            assert kept.propose([ask_of("a", now, temperature=temperature)]) == expected


def test_model_proposer_many_at_once_equal_one_by_one(tiny):
    many, single = ModelProposer(EngineConfig(model=tiny)), ModelProposer(EngineConfig(model=tiny))
    asks = [ask_of(str(at), [mix(at * 100 + n) % 256 for n in range(1 + at * 7)], k=1 + at % 5) for at in range(12)]
    answers = many.propose(asks)
    assert answers == [single.propose([ask])[0] for ask in asks]
    assert [len(answer) for answer in answers] == [ask.k for ask in asks]


def test_model_proposer_is_bounded(tiny):
    proposer = ModelProposer(
        EngineConfig(model=tiny, kv_pool_tokens=16 * 8, max_batch_tokens=32, max_running=3, max_model_len=120), 3
    )
    tokens = [mix(at) % 256 for at in range(200)]
    assert proposer.propose([ask_of("far", tokens[:100])]) == [[]], "catches up over several calls"
    for _ in range(2):
        assert proposer.propose([ask_of("far", tokens[:100])]) == [[]]
    assert len(proposer.propose([ask_of("far", tokens[:100])])[0]) == 4
    assert proposer.stats().behind == 3
    assert len(proposer.propose([ask_of("far", tokens[:118])])[0]) == 2, "no further than its context"
    assert proposer.propose([ask_of("far", tokens), ask_of("odd", [5000]), ask_of("none", [])]) == [[], [], []]
    answers = proposer.propose([ask_of(str(at), tokens[at : at + 10]) for at in range(5)])
    assert [len(answer) for answer in answers] == [4, 4, 4, 0, 0]
    assert proposer.stats().sequences == 3 and proposer.stats().evicted == 1
    for id in ("0", "1", "2", "far", "unknown"):
        proposer.forget(id)
    assert proposer.stats().free_pages == 8


def test_draft_misfit(tiny, tmp_path):
    same = inspect(write_checkpoint(tmp_path / "same", TinyModel(layers=1)))
    assert draft_misfit(inspect(tiny), same) is None
    file = tmp_path / "same" / "tokenizer.json"
    file.write_text(file.read_text().replace("  ", " "))
    assert draft_misfit(inspect(tiny), same) is None, "other bytes, same vocabulary"
    file.write_text(file.read_text().replace("<|im_end|>", "<|end|>"))
    assert "<|end|>" in draft_misfit(inspect(tiny), same)
