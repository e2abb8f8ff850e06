"""A draft head: its files, its arithmetic beside the network that it was trained as, and that it changes no token."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.libs.engine.rank_threads import in_threads, on_hosts

from penstock.checkpoint import CheckpointError, inspect, inspect_head
from penstock.engine.checks import settled
from penstock.engine.config import HEAD_PLACES, EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward.model import load_model
from penstock.engine.hooks import MOST_STATES, DraftTerms
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.speculation.head.foresight import HeadForesight
from penstock.engine.speculation.head.guessing import HeadAsk, HeadGuesser, HeadView
from penstock.engine.speculation.head.model import HeadContext, HeadModel, HeadRows
from penstock.engine.speculation.head.watched import states_of
from penstock.engine.speculation.leads import DraftTold
from penstock.engine.step.run import Run
from penstock.models.teach import load_head
from penstock.runtime.drafts import HEAD, MODEL, PROPOSERS
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.drafters import model_drafter
from penstock.testing.heads import HEAD_VOCABULARY, write_head


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture
def damaged(stored, tmp_path):
    """A copy of the head; call it with what to change."""

    def change(config=None, tensors=None):
        values = json.loads((stored / "config.json").read_text()) | (config or {})
        (tmp_path / "config.json").write_text(json.dumps(values))
        found = load_file(stored / "model.safetensors")
        for name, tensor in (tensors or {}).items():
            found.pop(name, None)
            if tensor is not None:
                found[name] = tensor
        save_file(found, tmp_path / "model.safetensors")
        return tmp_path

    return change


def model_of(directory, tiny) -> HeadModel:
    table = torch.randn(320, 64, generator=torch.Generator().manual_seed(5))
    head = inspect_head(directory, inspect(tiny))
    return HeadModel(head, lambda ids: table[ids], 1024, torch.device("cpu"))


# Files


def test_a_head_is_read_as_it_was_written(stored, tiny):
    head = inspect_head(stored, inspect(tiny))
    assert head.layers == (1, 2)
    assert (head.draft_vocab_size, head.hidden_size, head.n_heads, head.n_kv_heads) == (HEAD_VOCABULARY, 64, 4, 2)
    known = load_head(stored).t2d.nonzero().flatten()
    assert torch.equal(model_of(stored, tiny).known, known)


def test_layers_without_a_word_are_those_of_the_paper(damaged, tiny):
    target = inspect(tiny)
    deep = replace(target, config=replace(target.config, n_layers=32))
    directory = damaged({"eagle_config": None}, {"fc.weight": torch.zeros(64, 192)})
    assert inspect_head(directory, deep).layers == (2, 16, 29)


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures .* is no draft head"),
        ({"hidden_size": 32}, {}, "hidden_size is 32, that of the target .* is 64"),
        ({"vocab_size": 300}, {}, "vocab_size is 300"),
        ({"draft_vocab_size": 321}, {}, "draft_vocab_size 321 is more than the target has, 320"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported"),
        ({"norm_before_residual": True}, {}, "norm_before_residual True is not supported"),
        ({"num_attention_heads": 3}, {}, "num_attention_heads 3 is not a multiple"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, {}, r"layers \[0, 2\] .* which has 3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, {}, "must be growing numbers"),
        ({}, {"fc.weight": None}, "tensor fc.weight of a draft head is missing"),
        ({}, {"fc.weight": torch.zeros(64, 64)}, r"fc.weight has shape \[64, 64\], config.json makes it \[64, 128\]"),
        ({}, {"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}, r"q_proj.weight has shape"),
        ({}, {"d2t": None}, "tensor d2t of a draft head is missing"),
        ({}, {"d2t": torch.zeros(HEAD_VOCABULARY)}, "tensor d2t is F32, not I64"),
        ({}, {"lm_head.weight": torch.zeros(HEAD_VOCABULARY, 64, dtype=torch.int64)}, "lm_head.weight is I64"),
        ({}, {"more": torch.zeros(1)}, "tensor more is not part of a draft head"),
    ],
)
def test_what_does_not_fit_is_named(damaged, tiny, config, tensors, reason):
    with pytest.raises(CheckpointError, match=reason):
        inspect_head(damaged(config, tensors), inspect(tiny))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"d2t": torch.full((HEAD_VOCABULARY,), 320)}, "d2t names no 200 tokens of 320"),
        ({"d2t": -torch.arange(HEAD_VOCABULARY)}, "d2t names no 200 tokens"),
        ({"d2t": torch.zeros(HEAD_VOCABULARY, dtype=torch.int64)}, "t2d and d2t name different tokens"),
    ],
)
def test_tables_that_make_no_sense_are_refused(damaged, tiny, tensors, reason):
    with pytest.raises(CheckpointError, match=reason):
        model_of(damaged(tensors=tensors), tiny)


def test_pickles_are_not_read(damaged, tiny):
    directory = damaged()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is pickled"):
        inspect_head(directory, inspect(tiny))


# Arithmetic


@given(length=st.integers(3, 40), cuts=st.sets(st.integers(1, 39)), steps=st.integers(1, 5), seed=st.integers(0, 3))
@settings(max_examples=40)
def test_states_are_those_of_the_network(tmp_path_factory, tiny, length, cuts, steps, seed):
    """However the rows are cut, and going on from the last one with its own state."""
    directory = write_head(tmp_path_factory.mktemp("case"), seed)
    naive, model = load_head(directory), model_of(directory, tiny)
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 320, (length + steps,), generator=random).tolist()
    features = torch.randn(length, 128, generator=random)
    embedded = model._embed(torch.tensor([*ids[1:], 0]))
    rows = torch.tensor([length - 1])
    context, state = HeadContext(), torch.zeros(0)
    ends = sorted({cut for cut in cuts if cut < length} | {length})
    with torch.inference_mode():
        padded = torch.cat((features, torch.zeros(steps, 128)))
        wanted = naive(padded[None], embedded[None], steps, 1000, [rows])
        for begin, end in zip([0, *ends], ends, strict=False):
            state = model.forward(model.fuse(features[begin:end]), [HeadRows(context, ids[begin + 1 : end + 1])])
        for step in range(steps):
            torch.testing.assert_close(state[-1], wanted[step][0][0], atol=2e-4, rtol=1e-3)
            torch.testing.assert_close(model.logits(state[-1:]), naive.logits(wanted[step][0]), atol=2e-3, rtol=1e-3)
            if step + 1 < steps:
                state = model.forward(state[-1:], [HeadRows(context, [ids[length + step + 1]])])


def test_texts_do_not_see_each_other(stored, tiny):
    model, random = model_of(stored, tiny), torch.Generator().manual_seed(1)
    texts = [(torch.randn(count, 128, generator=random), [7 + count] * count) for count in (3, 1, 20)]
    with torch.inference_mode():
        alone = [model.forward(model.fuse(one), [HeadRows(HeadContext(), ids)]) for one, ids in texts]
        together = model.forward(
            model.fuse(torch.cat([one for one, _ in texts])), [HeadRows(HeadContext(), ids) for _, ids in texts]
        )
    torch.testing.assert_close(torch.cat(alone), together, atol=1e-5, rtol=1e-4)


def test_a_full_context_keeps_the_newer_half():
    context, rows = HeadContext(), torch.arange(900.0).view(900, 1, 1)
    for begin in range(0, 900, 9):
        keys, values = context.add(rows[begin : begin + 9], -rows[begin : begin + 9])
        assert torch.equal(keys, -values) and len(keys) <= 512
        assert torch.equal(keys.flatten(), rows[begin + 9 - len(keys) : begin + 9].flatten())
        assert (context.begin, context.end) == (begin + 9 - len(keys), begin + 9)
    assert len(keys) > 250


# What it sees


def test_it_begins_with_a_window_of_what_it_has_seen():
    watched, features = HeadView(), torch.arange(200.0).view(200, 1)
    for begin in range(0, 200, 50):
        watched.watch(begin, features[begin : begin + 50])
    begin, rows = watched.rows()
    assert begin == 200 - MOST_STATES and torch.equal(rows, features[-MOST_STATES:])
    assert watched.end == 200 and not watched.waiting


def test_what_waits_holds_no_memory_but_its_own():
    """Of a prompt's chunk only the last ones wait, and not the others of their step."""
    watched, step = HeadView(), torch.arange(1024.0).view(512, 2)
    watched.watch(0, step[:400])
    [(begin, last)] = watched.waiting
    assert begin == 400 - MOST_STATES and torch.equal(last, step[begin:400])
    assert last.untyped_storage().nbytes() == last.nbytes
    assert watched.ready(401)
    watched.rest()
    assert not watched.waiting and not watched.ready(401)
    watched.watch(401, step[:1])
    assert watched.rows()[0] == 401


def test_guesses_are_forgotten_when_the_text_goes_on():
    watched = HeadView()
    watched.watch(0, torch.zeros(9, 1))
    watched.rows()
    watched.context.add(torch.ones(9, 1, 1), torch.ones(9, 1, 1))
    watched.context.add(torch.zeros(4, 1, 1), torch.zeros(4, 1, 1))  # guesses
    watched.watch(9, torch.zeros(2, 1))
    assert watched.rows()[0] == 9
    assert (watched.context.begin, watched.context.end) == (0, 9)


def test_behind_a_gap_it_begins_anew():
    watched = HeadView()
    watched.watch(0, torch.zeros(9, 1))
    watched.rows()
    watched.context.add(torch.ones(9, 1, 1), torch.ones(9, 1, 1))
    watched.watch(30, torch.zeros(2, 1))
    assert watched.rows()[0] == 30
    assert (watched.context.begin, watched.context.end) == (30, 30)


# In an engine


def headed(config: EngineConfig, directory, place="worker") -> EngineConfig:
    return replace(config, draft_head=str(directory), draft_head_in=place)


@asynccontextmanager
async def guessing(config, directory, place, load=load_model):
    """An engine with the head there, and the proposer as which its guesses count."""
    async with AsyncExitStack() as stack:
        drafter = None
        if place == "service":
            drafter = await stack.enter_async_context(model_drafter(foresight(config.model, directory)))
        engine = await stack.enter_async_context(Engine.open(headed(config, directory, place), drafter, load))
        yield engine, PROPOSERS.index(HEAD if drafter is None else MODEL)


@pytest.mark.parametrize("place", HEAD_PLACES)
@pytest.mark.parametrize("kernels", [True, False])
async def test_same_tokens_with_a_head(config, kit, stored, kernels, place):
    """Of a head whose weights are drawn, so that it is mostly wrong. Prompts are cut, and sequences share steps."""
    config = replace(config, kernels=kernels, max_batch_tokens=40)
    requests = kit.mixed()
    async with Engine.open(config) as engine:
        plain = await kit.read_all(engine, requests)
    async with guessing(config, stored, place) as (engine, proposer):
        for one, other in zip(plain, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(one, other)
        stats = engine.stats()
        assert stats.drafts.verified[proposer] > 50
        assert stats.drafts.verified[proposer] == stats.drafted
        assert stats.free_pages == stats.total_pages


SPLITS = {
    "2 stages": ({"pp": 2}, False),
    "3 stages": ({"pp": 3}, False),
    "2 stages of 2 ranks": ({"tp": 2, "pp": 2}, False),
    "2 stages, torch": ({"pp": 2, "kernels": False}, False),
    "3 hosts": ({"pp": 3}, True),
    "2 hosts of 2 ranks": ({"tp": 2, "pp": 2}, True),
    "2 hosts, torch": ({"pp": 2, "kernels": False}, True),
}


@pytest.fixture(params=SPLITS)
def split(request, tmp_path):
    """Settings of a model in stages, and what loads it."""
    fields, away = SPLITS[request.param]
    return fields, on_hosts(write_checkpoint(tmp_path / "there")) if away else in_threads


async def test_stages_say_what_one_says(config, stored, split):
    """Features of prompts in pieces, of a batch of which some rows have none, and of drafts."""
    fields, load = split
    texts = [[(7 * at + 5 * place) % 256 for place in range(length)] for at, length in enumerate((300, 40, 200, 3))]
    settings_ = replace(headed(config, stored), max_batch_tokens=600)

    def run_of(at, start, known, drafts=()):
        tokens = texts[at][: start + known]
        choice = Choice(SamplingParams(9, temperature=0.0), frozenset(), tokens, len(tokens), drafts)
        return Run(choice, start, known, range(1 + 20 * at, 21 + 20 * at), (str(at), 0), featured=at != 1)

    def computed(own, load):
        checkpoint = inspect(own.model)
        runner, _ = load(settled(own, checkpoint), checkpoint)
        try:
            runner.tap((1, 2))
            prompts = [run_of(at, 0, len(text)) for at, text in enumerate(texts)]
            verifying = [run_of(at, len(text) - 1, 1, (5, 6, 7)) for at, text in enumerate(texts)]
            for step in (prompts, verifying):
                runner.step(step)
            return [run.features for run in (*prompts, *verifying)]
        finally:
            if runner.ranks is not None:
                runner.ranks.close()
            runner.memory.close()

    expected = await asyncio.to_thread(computed, settings_, load_model)
    found = await asyncio.to_thread(computed, replace(settings_, **fields), load)
    assert [None if one is None else len(one) for one in found] == [32, None, 32, 3, 4, None, 4, 4]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


async def test_a_head_guesses_the_same_beside_stages(config, kit, stored, split, monkeypatch):
    fields, load = split
    guess, told = HeadGuesser.guess, {}

    def watched(self, asks):
        texts = [tuple(ask.tokens) for ask in asks]
        found = guess(self, asks)
        told.update((text, one.tokens) for text, one in zip(texts, found, strict=True))
        return found

    monkeypatch.setattr(HeadGuesser, "guess", watched)
    requests = [kit.request(str(number), 30 + 90 * number, kit.greedy(24, logprobs=2)) for number in range(4)]
    answers, guesses = [], []
    for own, way in ((headed(config, stored), load_model), (headed(replace(config, **fields), stored), load)):
        told.clear()
        async with Engine.open(own, load=way) as engine:
            answers.append(await kit.read_all(engine, requests))
            assert engine.stats().drafts.verified[PROPOSERS.index(HEAD)] > 50
        guesses.append(dict(told))
    for one, other in zip(*answers, strict=True):
        kit.assert_same(one, other)
    assert guesses[0] == guesses[1]


async def test_a_served_head_hears_of_all_stages(config, kit, stored, split):
    fields, load = split
    requests = kit.mixed()
    async with Engine.open(config) as engine:
        plain = await kit.read_all(engine, requests)
    async with guessing(replace(config, **fields), stored, "service", load) as (engine, proposer):
        for one, other in zip(plain, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(one, other)
        assert engine.stats().drafts.verified[proposer] > 50


async def test_rejected_guesses_reach_no_sink(config, kit, stored):
    request = kit.request("one", 50, kit.greedy(40))
    blocks = []
    for settings_ in (config, headed(config, stored)):
        sink = kit.Sink()
        async with Engine.open(settings_) as engine:
            await kit.read(engine, request, sink=sink)
        blocks.append((sink.blocks, sink.tokens, sink.valid_tokens, sink.tail))
    assert blocks[0] == blocks[1]


async def test_pages_that_are_too_few(config, kit, stored):
    """Sequences lose their pages and begin again while a head follows them."""
    requests = [kit.request(str(number), 90, kit.seeded(number, 60)) for number in range(5)]
    async with Engine.open(config) as engine:
        plain = await kit.read_all(engine, requests)
    async with Engine.open(headed(replace(config, kv_pool_tokens=400), stored)) as engine:
        for one, other in zip(plain, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(one, other)
        assert engine.stats().preemptions > 0
        assert engine.stats().drafts.verified[PROPOSERS.index(HEAD)] > 50


async def test_a_head_that_fails_is_left_alone(config, kit, stored, monkeypatch, caplog):
    monkeypatch.setattr(HeadGuesser, "guess", lambda self, asks: 1 / 0)
    request = kit.request("one", 20, kit.greedy())
    async with Engine.open(headed(config, stored)) as engine:
        answers = [await kit.read(engine, replace(request, id=str(number))) for number in range(2)]
        assert engine.stats().draft_failures == 1
        assert engine.stats().drafted == 0
    assert answers[0].ids == answers[1].ids and len(answers[0].ids) == 24
    assert "the draft head failed" in caplog.text


async def test_a_head_of_another_model_is_refused(config, stored, tmp_path):
    values = json.loads((stored / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "hidden_size": 128}))
    with pytest.raises(CheckpointError, match=r"hidden_size is 128, that of the target .* is 64"):
        async with Engine.open(headed(config, tmp_path)):
            pass


@pytest.mark.parametrize("place", HEAD_PLACES)
async def test_grammars_shape_its_guesses(config, kit, stored, place):
    """What it guesses inside of a grammar is legal there."""
    sampling = kit.greedy(30, ignore_eos=False, grammar='start: "ab" "cd"* | /[0-9 ]{4,20}/')
    request = Request("one", tuple(range(60, 90)), sampling)
    async with Engine.open(config) as engine:
        plain = await kit.read(engine, request)
    async with guessing(config, stored, place) as (engine, proposer):
        kit.assert_same(plain, await kit.read(engine, request))
        assert engine.stats().drafts.verified[proposer] > 0


# In a service


class Telling:
    """Tells a served head of texts whose states are drawn."""

    def __init__(self, model: HeadForesight) -> None:
        self.model = model
        self.numbers: dict[int, int] = {}
        self.random = torch.Generator().manual_seed(1)

    def features(self, rows: int):
        return torch.randn(rows, 2 * 64, generator=self.random).bfloat16()

    def tell(self, id, keep, tokens, k=3, states=None, owner=b""):
        self.numbers[id] = sum(self.numbers.values()) + 1
        terms = None if keep else DraftTerms(SamplingParams(99, temperature=0.0), 1, frozenset(), owner)
        told = None if states is None else states_of(*states)
        self.model.tell(DraftTold((1, id), self.numbers[id], keep, tokens, k, terms, states=told))

    def step(self):
        made = self.model.step()
        for lead in made.leads:
            assert lead.after == self.numbers[lead.id[1]]
        return {lead.id[1]: (lead.length, list(lead.tokens)) for lead in made.leads}, [id for _, id in made.refused]


def foresight(target, head, **settings) -> HeadForesight:
    checkpoint = inspect(target)
    return HeadForesight(EngineConfig(model=target, **settings), checkpoint, inspect_head(head, checkpoint))


def test_a_served_head_guesses_what_the_head_guesses(tiny, stored):
    telling = Telling(foresight(tiny, stored))
    own, view = telling.model._guesser, HeadView()
    text = list(range(5, 45))
    telling.tell(1, 0, text, states=(0, features := telling.features(39)))
    view.watch(0, features)
    for length in (40, 41, 44):
        guess, _ = telling.step()
        sampling = SamplingParams(99, temperature=0.0)
        [alone] = own.guess([HeadAsk(view, text, 3, Choice(sampling, frozenset(), text, 1))])
        assert guess == {1: (length, list(alone.tokens))} and alone.tokens
        assert telling.step() == ({}, []), "once for each time that it is told"
        more = telling.features(1 if length == 40 else 3)
        text = [*text, *range(7, 7 + len(more))]
        view.watch(length - 1, more)
        telling.tell(1, length, text[length:], states=(length - 1, more))


def test_without_its_states_a_text_gets_no_guesses(tiny, stored):
    telling = Telling(foresight(tiny, stored))
    telling.tell(1, 0, [5, 6, 7, 8])
    assert telling.step() == ({}, [])
    telling.tell(1, 4, [9], states=(3, telling.features(1)))
    assert telling.step()[0], "those of the last token but one are enough"
    telling.tell(1, 5, [10, 11], states=(4, telling.features(1)))
    assert telling.step() == ({}, []), "those of the last but one are missing"
    telling.tell(1, 2, [9, 9], states=(2, telling.features(1)))
    assert telling.step()[0], "the text went another way"


def test_states_that_are_not_finite_are_left_out_and_disturb_nobody(tiny, stored):
    telling, alone = Telling(foresight(tiny, stored)), Telling(foresight(tiny, stored))
    for each in (telling, alone):
        each.tell(1, 0, [5, 6, 7, 8], states=(0, each.features(3)))
    broken = telling.features(3)
    broken[1, 1] = float("nan")
    telling.tell(2, 0, [5, 6, 7, 8], states=(0, broken))
    assert telling.step() == alone.step()


def test_states_that_are_too_large_disturb_nobody(tiny, stored):
    """They are finite, but what is computed from them is not."""
    telling, alone = Telling(foresight(tiny, stored)), Telling(foresight(tiny, stored))
    for each in (telling, alone):
        each.tell(1, 0, [5, 6, 7, 8], states=(0, each.features(3)))
    telling.tell(2, 0, [5, 6, 7, 8], states=(0, torch.full((3, 128), 3e38)))
    guesses, refused = telling.step()
    assert guesses[1] == alone.step()[0][1] and refused == [2]


def test_strange_tokens_and_texts_that_are_too_long_are_refused(tiny, stored):
    telling = Telling(foresight(tiny, stored))
    telling.tell(1, 0, [5, 6, 400], states=(0, telling.features(2)))
    assert telling.step() == ({}, [1])
    limit = telling.model.checkpoint.config.max_positions
    telling.tell(2, 0, [5] * limit, states=(limit - 3, telling.features(2)))
    assert telling.step() == ({}, [2])


def test_no_guess_leaves_the_longest_text(tiny, stored):
    """However many tokens a worker wants."""
    telling = Telling(foresight(tiny, stored))
    limit = telling.model.checkpoint.config.max_positions
    telling.tell(1, 0, [5] * (limit - 2), k=128, states=(limit - 6, telling.features(3)))
    telling.model._guesser._model.logits = lambda state: torch.eye(1, HEAD_VOCABULARY).expand(len(state), -1) * 99
    assert [len(tokens) for _, tokens in telling.step()[0].values()] == [2]


def test_where_there_is_not_room_for_all_the_youngest_go_without(tiny, stored):
    telling = Telling(foresight(tiny, stored, kv_pool_tokens=1024, max_model_len=512))
    for id in (1, 2, 3):
        telling.tell(id, 0, [5, 6, 7, id], states=(0, telling.features(3)))
    guesses, refused = telling.step()
    assert (sorted(guesses), refused) == ([1, 2], [3])
    telling.tell(4, 0, [5, 6, 7, 4], states=(0, telling.features(3)), owner=b"another")
    guesses, refused = telling.step()
    assert (sorted(guesses), refused) == ([4], [2])
    telling.model.forget((1, 1))
    telling.tell(3, 4, [9], states=(3, telling.features(1)))
    assert sorted(telling.step()[0]) == [3]


def test_more_texts_than_a_call_takes_are_served_in_turn(tiny, stored):
    telling = Telling(foresight(tiny, stored, max_running=2))
    for id in range(5):
        telling.tell(id, 0, [5, 6, 7, id], states=(0, telling.features(3)))
    assert [sorted(telling.step()[0]) for _ in range(4)] == [[0, 1], [2, 3], [4], []]
