"""Ranks that compute in memory of their own, as on CUDA devices, say what one process says.

The device is the CPU here, which has memory enough for two copies; what differs on CUDA devices are the copies' kind
and the way sums go.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import torch
from tests.libs.engine.rank_threads import in_threads, on_hosts
from tests.libs.engine.test_ranks import MODELS, config_of

from penstock.checkpoint import Rank, inspect, part_of
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineClosed
from penstock.engine.ranks import apart
from penstock.engine.ranks.apart import PagesApart
from penstock.engine.ranks.messages import PlainRows
from penstock.engine.step.memory import PageMemory
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TinyModel, write_checkpoint

CASES = [
    *((name, 2, 1, 1) for name in MODELS),
    ("one KV head", 4, 1, 1),
    ("deepseek in vectors", 4, 2, 1),
    ("mixtral", 4, 2, 1),
    *((name, 1, 1, 2) for name in ("llama", "gemma", "deepseek")),
    ("one KV head", 2, 1, 2),
    ("mixtral", 2, 2, 2),
    ("llama 4", 2, 1, 3),
]
"""Ranks of a stage, groups of whole experts, stages."""
HOSTED = [("llama", 1, 1, 2), ("deepseek", 2, 1, 2), ("mixtral", 2, 2, 2)]
"""Likewise, with each stage but the first on another host."""


@pytest.mark.parametrize(
    ("name", "ranks", "groups", "stages", "away"),
    [(*case, False) for case in CASES] + [(*case, True) for case in HOSTED],
)
async def test_split_engine_says_the_same(tmp_path, kit, name, ranks, groups, stages, away, monkeypatch):
    """Logprobs to 1e-4 in float32: prompts in chunks, together, with a prefix that an engine in one process has
    computed, and with drafts; and that engine goes on from what the split one has computed. With few pages, which
    change hands, and copies in portions."""
    monkeypatch.setattr(apart, "_PORTION", 5_000)  # else all is in one
    directory = write_checkpoint(tmp_path / "model", MODELS[name])
    config = config_of(directory, kernels=False, kv_pool_tokens=1024)
    requests = kit.mixed()
    long = kit.request("long", 200, kit.greedy(12, logprobs=3))
    wrong = kit.Drafts(lambda ask: [(token + 1) % 256 if number == 2 else token for number, token in enumerate(right)])
    async with Engine.open(config) as whole:
        expected = await kit.read_all(whole, requests)
        alone = kit.Sink()
        said = await kit.read(whole, long, sink=alone)
    right = said.ids[:4]
    load = on_hosts(directory) if away else in_threads
    split = replace(config, tp=ranks, ep=groups, pp=stages, pages_apart=True)
    async with Engine.open(split, wrong, load) as engine:
        assert engine.spec == whole.spec
        for turn in range(3):
            again = [kit.renamed(request, f"{request.id} {turn}") for request in requests]
            for found, wanted in zip(await kit.read_all(engine, again), expected, strict=True):
                kit.assert_same(found, wanted)
        blocks = [alone.blocks[number] for number in range(9)]
        found = await kit.read(engine, long, source=kit.Source(blocks), sink=kit.Sink())
        kit.assert_same(found, said)
        assert found.last.cached_tokens == 9 * 16
        cold = kit.Sink()
        kit.assert_same(await kit.read(engine, kit.renamed(long, "cold"), sink=cold), said)
        assert engine.stats().drafted > 0
    async with Engine.open(config) as whole:
        blocks = [cold.blocks[number] for number in range(11)]
        again = await kit.read(whole, long, source=kit.Source(blocks))
        kit.assert_same(again, said)
        assert again.last.cached_tokens == 11 * 16


RANKS = [(2, None), (4, None), (2, range(1, 3)), (1, range(2, 3))]
"""Ranks of a stage, and its layers."""


def random_pages(model, dtype):
    """Pages of the whole model, with numbers in them."""
    pages = PageMemory(model, 5, 16, dtype, torch.device("cpu"))
    pages.data.copy_(torch.randn(pages.data.shape, generator=torch.Generator().manual_seed(1)))
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "layers"), RANKS)
@pytest.mark.parametrize("name", ["gqa", "one head", "latent"])
def test_parts_are_those_of_the_pages(tmp_path, monkeypatch, name, ranks, layers, dtype):
    """What ranks bring is what the pages have of their layers and heads. What all of them take back is what they have
    written there, each number once, and nothing else."""
    monkeypatch.setattr(apart, "_PORTION", 3_000)
    models = {"gqa": TinyModel(heads=4, kv_heads=2), "one head": TinyModel(kv_heads=1), "latent": DEEPSEEK_IN_VECTORS}
    found = inspect(write_checkpoint(tmp_path / "model", models[name]))
    pages = random_pages(found.config, dtype)
    before, heads = pages.data.clone(), pages.heads[0]
    of_ranks = [part_of(found, Rank(rank, ranks, layers=layers), "") for rank in range(ranks)]
    parts = [PagesApart(pages, part, torch.device("cpu")) for part in of_ranks]
    some = slice(None) if layers is None else slice(layers.start, layers.stop)
    for rank, part in enumerate(parts):
        part.own.data.fill_(9)
        part.bring([4, 1], [2])
        first = rank * heads // ranks
        own = pages.data[:, some, :, :, first : first + max(1, heads // ranks)]
        assert torch.equal(part.own.data[[4, 1]], own[[4, 1]])
        assert (part.own.data[2] == 0).all() and (part.own.data[[0, 3, 5]] == 9).all()
    order = [PlainRows([1] * 20, 10, 1, ("a", 0), [4, 1], None), PlainRows([7], 2, 1, ("b", 0), [3], None)]
    expected = before.clone()
    for part in parts:
        part.own.data.fill_(5)
        part.take_back(order)
    expected[4, some, :, 10:] = 5
    expected[1, some, :, :14] = 5
    expected[3, some, :, 2] = 5
    assert torch.equal(pages.data, expected)
    fewest = min(heads, ranks)
    pages.data.zero_()
    took = 0
    for part in parts:
        part.take_back(order)
        took += bool(pages.data.any())
        pages.data.zero_()
    assert took == fewest, "one of those that have the same heads"


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}], ids=str)
async def test_processes_say_the_same_in_bfloat16(tmp_path, kit, split):
    """As processes whose pages are the shared ones."""
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    config = config_of(directory, dtype="bfloat16", kernels=False, **split)
    said = []
    for own in (False, True):
        async with Engine.open(replace(config, pages_apart=own)) as engine:
            said.append(await kit.read_all(engine, [kit.request("one", 40, kit.greedy(8))]))
    assert said[0][0].ids == said[1][0].ids


async def test_killed_rank_takes_its_engine_out(tmp_path, kit):
    """As one that computes in the shared pages, by torch.distributed too."""
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    async with Engine.open(config_of(directory, tp=2, kernels=False, pages_apart=True)) as engine:
        stream = engine.generate(kit.request("r", 20, kit.greedy(900)))
        await anext(stream)
        os.kill(engine._runner.ranks.pids[0], signal.SIGKILL)
        async with asyncio.timeout(10):
            with pytest.raises(EngineClosed):
                async for _ in stream:
                    pass
            await engine.lost.wait()
