"""Everything at once: random requests, sources, sinks, drafts and farewells on a pool that is too small."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from penstock.engine.engine import Engine
from penstock.kv.identity import Chain


@pytest.mark.parametrize("seed", range(4))
async def test_every_answer_is_the_one_it_would_have_been_alone(config, kit, seed):
    luck = random.Random(seed)
    requests = [draw_request(kit, luck, number) for number in range(30)]
    async with Engine.open(config) as engine:
        sinks = [kit.Sink() for _ in requests]
        expected = [await kit.read(engine, request, sink=sink) for request, sink in zip(requests, sinks, strict=True)]
    known = {one.id: [*one.prompt, *answer.ids] for one, answer in zip(requests, expected, strict=True)}

    def guess(ask):
        right = known[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k]
        return [token if luck.random() < 0.7 else luck.randrange(320) for token in right]

    tight = replace(
        config,
        kv_pool_tokens=16 * luck.randint(20, 40),
        max_batch_tokens=luck.randint(12, 80),
        max_running=luck.randint(3, 12),
        draft_tokens=luck.randint(1, 6),
    )
    async with Engine.open(tight, kit.Drafts(guess)) as engine:

        async def one(request, answer, sink):
            blocks = [sink.blocks[number] for number in range(len(request.prompt) // 16)]
            source = luck.choice([None, kit.Source(blocks, step=3), kit.Source(blocks[:2], OSError("gone"))])
            for _ in range(luck.randint(0, 20)):
                await asyncio.sleep(0)
            patience = luck.choice([1, 3, 1000, 1000, 1000])
            seen, lent = kit.Answer(), kit.Sink(hold=luck.random() < 0.2)
            chain = luck.choice([None, *[Chain(root, 16, request.prompt) for root in (b"one tenant", b"another")]])
            async with aclosing(engine.generate(request, source, lent, chain=chain)) as updates:
                async for update in updates:
                    seen.updates.append(update)
                    lent.release()
                    if len(seen.updates) == patience:
                        break
            lent.release()
            if seen.last.finish is None:
                assert seen.ids == answer.ids[: len(seen.ids)]
            else:
                kit.assert_same(answer, seen)

        await asyncio.gather(*[one(*each) for each in zip(requests, expected, sinks, strict=True)])
        while engine.stats().free_pages != engine.stats().total_pages:
            await asyncio.sleep(0)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.loading, stats.sink_failures) == (0, 0, 0, 0)


def draw_request(kit, luck, number):
    fields = {"logprobs": luck.choice([None, 0, 2]), "ignore_eos": luck.random() < 0.7}
    if luck.random() < 0.4:
        fields |= {"repetition_penalty": luck.uniform(0.9, 1.3), "presence_penalty": luck.uniform(-1, 1)}
    if luck.random() < 0.3:
        fields |= {"min_tokens": luck.randint(1, 9), "logit_bias": {luck.randrange(320): luck.uniform(-5, 5)}}
    count = luck.randint(1, 60)
    sampling = kit.greedy(count, **fields) if luck.random() < 0.5 else kit.seeded(number, count, **fields)
    one = kit.request(f"storm {number}", luck.choice([1, 5, 16, 31, 32, 33, 80, 150]), sampling)
    common = kit.request("common", 150, sampling).prompt[: luck.choice([0, 10, 40, 150])]
    return replace(one, prompt=common[: len(one.prompt)] + one.prompt[len(common) :])
