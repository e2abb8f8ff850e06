"""Blocks that are not full: rows that another sequence has computed are copied, and nobody sees a difference."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.engine.errors import NotFinite
from penstock.kv.identity import Chain
from penstock.testing.checkpoints import TinyModel, write_checkpoint

SIZE, LEAST = 16, 4
ROOT, OTHER = b"r" * 32, b"o" * 32


def prompt(seed, length):
    return tuple(random.Random(seed).choices(range(256), k=length))


def asks(kit, name, tokens, seed=1, **fields):
    return replace(kit.request(name, 1, kit.seeded(seed, **fields)), prompt=tokens)


def chain(request, root=ROOT):
    return Chain(root, SIZE, request.prompt + request.output)


async def read(engine, kit, request, sink=None, root=ROOT):
    return await kit.read(engine, request, None, sink, chain(request, root))


async def alone(config, kit, requests):
    """(Answer, sink) of each request, computed without sharing."""
    async with Engine.open(replace(config, kv_pool_tokens=16384)) as engine:
        sinks = [kit.Sink() for _ in requests]
        return [(await kit.read(engine, one, None, sink), sink) for one, sink in zip(requests, sinks, strict=True)]


def same_kv(one, other):
    return one.valid_tokens == other.valid_tokens and one.blocks == other.blocks and one.tail == other.tail


WINDOWS = TinyModel(architecture="MistralForCausalLM", extra={"sliding_window": 21})


@pytest.mark.parametrize(
    "fields",
    [{}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}, {"kernels": False}, {"kernels": False, "kv_dtype": "int8"}],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "windows"])
async def test_eight_with_the_same_prompt_compute_its_last_token_only(config, kit, tmp_path, fields, model):
    if model == "windows":
        config = replace(config, model=write_checkpoint(tmp_path / "windows", WINDOWS))
    config = replace(config, **fields)
    length = 6 * SIZE + 15
    requests = [asks(kit, f"choice {seed}", prompt(1, length), seed) for seed in range(8)]
    expected = await alone(config, kit, requests)
    async with Engine.open(config) as engine:
        sinks = [kit.Sink() for _ in requests]
        found = await asyncio.gather(*[read(engine, kit, *pair) for pair in zip(requests, sinks, strict=True)])
        for (one, its), other, theirs in zip(expected, found, sinks, strict=True):
            kit.assert_same(one, other)
            assert same_kv(its, theirs) or not config.kernels, "torch may round another way in steps of another size"
        assert [answer.last.computed_tokens for answer in found] == [length, *[1] * 7]
        assert [answer.last.shared_tokens for answer in found] == [0, *[length - 1] * 7]
        stats = engine.stats()
        assert stats.computed_tokens == length + 7 + 8 * 23 and stats.copied_tokens == 7 * 14
        assert stats.free_pages == stats.total_pages and stats.failed_steps == 0


@pytest.mark.parametrize("common", range(1, 2 * SIZE + 1))
async def test_any_common_beginning_is_taken(config, kit, common):
    """Of a full block too, and of the first block of a prompt; but not fewer tokens than are worth it."""
    first = asks(kit, "first", prompt(1, 40), max_tokens=1)
    second = asks(kit, "second", (*first.prompt[:common], first.prompt[common] ^ 1, *prompt(2, 20)))
    [(expected, kv)] = await alone(config, kit, [second])
    async with Engine.open(config) as engine:
        await read(engine, kit, first)
        sink = kit.Sink()
        found = await read(engine, kit, second, sink)
        kit.assert_same(expected, found)
        assert same_kv(kv, sink)
        taken = common if common % SIZE in (0, *range(LEAST, SIZE)) else common // SIZE * SIZE
        assert found.last.shared_tokens == taken and found.last.computed_tokens == len(second.prompt) - taken
        assert engine.stats().copied_tokens == taken % SIZE


@pytest.mark.parametrize("tokens", [24, 25, 40])
async def test_the_next_turn_computes_nothing_of_the_turn_before(config, kit, tokens):
    """But its last token, which no step computed."""
    first = asks(kit, "turn 1", prompt(1, 100), max_tokens=tokens)
    async with Engine.open(config) as engine:
        answer = await read(engine, kit, first)
        turn = asks(kit, "turn 2", (*first.prompt, *answer.ids, 7, 8, 9))
        [(expected, kv)] = await alone(config, kit, [turn])
        sink = kit.Sink()
        found = await read(engine, kit, turn, sink)
        kit.assert_same(expected, found)
        assert same_kv(kv, sink)
        assert found.last.computed_tokens == 1 + 3
        assert len(engine.pool._tails) <= 1, "that of the turn before is in the page of this turn"


async def test_a_turn_that_ends_with_a_stop_token_leaves_its_tail(config, kit):
    """As well as one that is cut off."""
    first = asks(kit, "turn 1", prompt(1, 100), max_tokens=200, ignore_eos=False, stop_token_ids=frozenset(range(60)))
    async with Engine.open(config) as engine:
        answer = await read(engine, kit, first)
        assert answer.last.finish == "stop" and len(answer.ids) > 1 and (100 + len(answer.ids) - 1) % SIZE >= LEAST
        found = await read(engine, kit, asks(kit, "turn 2", (*first.prompt, *answer.ids, 7)))
        assert found.last.computed_tokens == 2


async def test_another_tenant_copies_nothing(config, kit):
    first = asks(kit, "first", prompt(1, 30))
    async with Engine.open(config) as engine:
        await read(engine, kit, first)
        found = await read(engine, kit, replace(first, id="other"), root=OTHER)
        assert found.last.computed_tokens == 30 and engine.stats().copied_tokens == 0
        found = await kit.read(engine, replace(first, id="nameless"))
        assert found.last.computed_tokens == 30 and engine.stats().copied_tokens == 0


async def test_rows_of_wrong_drafts_are_never_copied(config, kit):
    """The page has them when the text ends, behind its rows."""
    plain = asks(kit, "plain", prompt(1, 33), max_tokens=7)
    [(text, _)] = await alone(config, kit, [plain])
    right, end = text.ids, 33 + 4
    plain = replace(plain, sampling=replace(plain.sampling, stop_token_ids=frozenset([right[4]])))
    assert right[4] not in right[:4]

    def drafts(ask):
        """A right one, and a wrong one behind it."""
        done = len(ask.tokens) - 33
        return (right[done], right[done + 1] ^ 1)

    wrong = asks(kit, "wrong", (*plain.prompt, *right[:4], right[4] ^ 1, 7))
    [(expected, kv)] = await alone(config, kit, [wrong])
    async with Engine.open(config, kit.Drafts(drafts)) as engine:
        assert (await read(engine, kit, plain)).ids == right[:5]
        assert (engine.stats().drafted, engine.stats().accepted) == (4, 2)
        engine._speculation.tell = lambda *_: None
        sink = kit.Sink()
        found = await read(engine, kit, replace(wrong, sampling=kit.seeded(1, 1)), sink)
        assert found.ids == expected.ids[:1] and sink.blocks == {n: kv.blocks[n] for n in range(2)}
        assert found.last.shared_tokens == end, "the wrong one is computed"


async def test_a_tail_that_is_not_finite_is_never_copied(config, kit):
    first = asks(kit, "first", prompt(1, 25), max_tokens=5)
    async with Engine.open(config) as engine:
        memory, looked = engine._runner.memory, []
        memory.sound_rows = lambda page, rows: bool(looked.append(rows))
        await read(engine, kit, first)
        found = await read(engine, kit, replace(first, id="again"))
        assert looked == [9, 13] * 2, "at the end of the prompt and at that of the text"
        assert found.last.shared_tokens == SIZE and engine.stats().copied_tokens == 0


async def test_a_request_that_fails_takes_what_it_copied_with_it(config, kit):
    """Nobody knows which of the rows are wrong."""
    first = asks(kit, "first", prompt(1, 10), max_tokens=1)
    async with Engine.open(config) as engine:
        await read(engine, kit, first)
        step = engine._runner.step

        def failing(runs):
            if any(run.source is not None for run in runs):
                raise NotFinite
            return step(runs)

        engine._runner.step = failing
        with pytest.raises(NotFinite):
            await read(engine, kit, replace(first, id="second"))
        found = await read(engine, kit, replace(first, id="third"))
        assert found.last.computed_tokens == 10


async def test_a_reader_that_leaves_leaves_the_tail_of_its_prompt(config, kit):
    first = asks(kit, "first", prompt(1, 30), max_tokens=200)
    async with Engine.open(config) as engine:
        async with aclosing(engine.generate(first, chain=chain(first))) as updates:
            await anext(updates)
        found = await read(engine, kit, replace(first, id="again", sampling=kit.greedy(2)))
        assert found.last.computed_tokens == 1


async def test_a_step_that_is_repeated_in_halves_copies_again(config, kit):
    first = asks(kit, "first", prompt(1, 30))
    others = [asks(kit, f"choice {seed}", prompt(1, 30), seed) for seed in range(4)]
    expected = await alone(config, kit, others)
    async with Engine.open(config) as engine:
        await read(engine, kit, first)
        step, copies = engine._runner.step, []

        def only_alone(runs):
            answers = step(runs)
            copies.append(sum(run.source is not None for run in runs))
            if len(runs) > 1:
                raise RuntimeError("too many")
            return answers

        engine._runner.step = only_alone
        found = await asyncio.gather(*[read(engine, kit, one) for one in others])
        for (one, _), other in zip(expected, found, strict=True):
            kit.assert_same(one, other)
            assert other.last.computed_tokens == 1
        assert sum(copies) > 4 and engine.stats().copied_tokens == 4 * 13


async def test_pages_are_not_taken_from_those_who_copy_from_them(config, kit):
    """The pool has just the pages that are needed, so the page to copy from is the next one to be used again."""
    first = asks(kit, "first", prompt(1, 3 * SIZE + 8), max_tokens=1)
    second = asks(kit, "second", (*first.prompt, *prompt(2, SIZE)), max_tokens=2)
    [(expected, _)] = await alone(config, kit, [second])
    for pages in range(5, 9):
        async with Engine.open(replace(config, kv_pool_tokens=pages * SIZE, resident_share=1.0)) as engine:
            await read(engine, kit, first)
            found = await read(engine, kit, second)
            kit.assert_same(expected, found)
            assert found.last.shared_tokens == 3 * SIZE + (8 if pages > 5 else 0)


@pytest.mark.parametrize("seed", range(4))
async def test_random_texts_with_common_beginnings(config, kit, seed):
    """Comings and goings on a pool that is too small: tokens and KV are those of each text alone."""
    luck = random.Random(seed)
    texts = [prompt(seed, 90)]
    for number in range(30):
        cut = luck.randrange(90)
        texts.append((*luck.choice(texts)[:cut], *prompt(f"{seed} {number}", 90 - cut)))
    requests = [
        asks(kit, f"{number}", text[: luck.randint(1, 90)], number, max_tokens=luck.randint(1, 40))
        for number, text in enumerate(texts)
    ]
    expected = await alone(config, kit, requests)
    async with Engine.open(replace(config, kv_pool_tokens=SIZE * 24, max_batch_tokens=48, max_running=6)) as engine:

        async def one(request, answer, kv):
            for _ in range(luck.randint(0, 100)):
                await asyncio.sleep(0)
            if luck.random() < 0.2:
                async with aclosing(engine.generate(request, chain=chain(request))) as updates:
                    async for _ in updates:
                        if luck.random() < 0.3:
                            return
                return
            sink = kit.Sink()
            found = await read(engine, kit, request, sink)
            kit.assert_same(answer, found)
            assert same_kv(kv, sink)
            last = found.last
            assert last.shared_tokens + last.computed_tokens == len(request.prompt)

        await asyncio.gather(*[one(request, *whole) for request, whole in zip(requests, expected, strict=True)])
        while engine.stats().free_pages != engine.stats().total_pages:
            await asyncio.sleep(0)
        stats = engine.stats()
        assert stats.copied_tokens > 100 and stats.failed_steps == 0


def test_rows_are_copied_and_the_others_are_zeros(config):
    from penstock.checkpoint import inspect
    from penstock.engine.step.memory import PageMemory

    model = inspect(config.model, None).config
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        memory = PageMemory(model, 4, SIZE, dtype, torch.device("cpu"))
        memory.data.view(torch.uint8).random_(1, 100)
        before = memory.data.clone()
        memory.copy_rows(2, 3, 5)
        assert torch.equal(memory.data[3, :, :, :5], before[2, :, :, :5]) and not memory.data[3, :, :, 5:].any()
        assert torch.equal(memory.data[:3], before[:3]) and torch.equal(memory.data[4:], before[4:])


def test_a_row_that_is_not_finite_is_found(config):
    from penstock.checkpoint import inspect
    from penstock.engine.step.memory import PageMemory

    model = inspect(config.model, None).config
    for dtype in (torch.float32, torch.bfloat16):
        memory = PageMemory(model, 4, SIZE, dtype, torch.device("cpu"))
        memory.data[2, 1, 1, 5, 0, 3] = float("nan")
        assert memory.sound_rows(2, 5) and not memory.sound_rows(2, 6) and memory.sound_rows(1, 15)
    memory = PageMemory(model, 4, SIZE, torch.int8, torch.device("cpu"))
    assert not memory.sound_rows(2, 1), "a scale is never zero"
    scales = memory.data[..., -model.n_kv_heads * 4 :]
    scales[2, :, :, :6] = torch.ones(model.n_kv_heads).view(torch.int8)
    scales[2, 1, 1, 5, :4] = torch.tensor([float("inf")]).view(torch.int8)
    assert memory.sound_rows(2, 5) and not memory.sound_rows(2, 6)
