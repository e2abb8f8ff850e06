"""Ranks that compute in memory of their own, as on CUDA devices, say what one process says.

The device is the CPU here, which has memory enough for two copies; what differs on CUDA devices are the copies' kind
and the way sums go.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.libs.engine.rank_threads import in_threads, on_hosts
from tests.libs.engine.test_ranks import MODELS, config_of

from penstock.engine.engine import Engine
from penstock.engine.ranks import apart
from penstock.testing.checkpoints import write_checkpoint

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
