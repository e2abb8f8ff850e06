"""A model split over several processes says what it says in one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace

import msgspec
import pytest
import torch
from tests.libs.engine.rank_threads import in_threads, on_hosts

from penstock.checkpoint import CheckpointError, inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineClosed
from penstock.engine.forward.following import follow
from penstock.engine.ranks import distance
from penstock.engine.ranks.messages import Setup, SharedMemory, receive, send, settings_of
from penstock.engine.ranks.window import PageWindow
from penstock.engine.step.memory import PageMemory
from penstock.runtime.config import ConfigError
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TINY_DEEPSEEK, TINY_LLAMA_4, TinyModel, write_checkpoint

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": TinyModel(),
    "qwen 2, tied": TinyModel(architecture="Qwen2ForCausalLM", tied=True),
    "qwen 3": TinyModel(architecture="Qwen3ForCausalLM", extra={"attention_bias": True}),
    "one KV head": TinyModel(kv_heads=1),
    "gemma": TinyModel(architecture="Gemma2ForCausalLM", layers=2, extra={"sliding_window": 24}),
    "phi": TinyModel(architecture="Phi3ForCausalLM"),
    "mixtral": TinyModel(architecture="MixtralForCausalLM", extra=MIXTRAL),
    "deepseek": TINY_DEEPSEEK,
    "deepseek, plain queries": replace(
        TINY_DEEPSEEK, extra={**TINY_DEEPSEEK.extra, "q_lora_rank": None, "attention_bias": True}
    ),
    "deepseek in vectors": DEEPSEEK_IN_VECTORS,
    "deepseek in vectors, plain queries": replace(
        DEEPSEEK_IN_VECTORS, extra={**DEEPSEEK_IN_VECTORS.extra, "q_lora_rank": None, "attention_bias": True}
    ),
    "llama 4": TINY_LLAMA_4,
}
CASES = [(name, 2, 1, 1, True) for name in MODELS] + [
    ("one KV head", 4, 1, 1, True),
    ("deepseek", 4, 1, 1, True),
    ("llama", 2, 1, 1, False),
    ("mixtral", 4, 1, 1, False),
    ("mixtral", 2, 2, 1, True),
    ("mixtral", 4, 2, 1, True),
    ("mixtral", 4, 4, 1, False),
    ("deepseek", 4, 2, 1, True),
    ("deepseek in vectors", 4, 2, 1, True),
    ("llama 4", 2, 2, 1, True),
    *(
        (name, 1, 1, 2, True)
        for name in ("llama", "qwen 2, tied", "gemma", "mixtral", "deepseek in vectors", "llama 4")
    ),
    ("llama", 1, 1, 3, False),
    ("llama", 2, 1, 2, True),
    ("mixtral", 2, 2, 2, False),
]
"""Ranks of a stage, groups of whole experts, stages, and whether there are kernels."""
HOSTED = [
    *((name, 1, 1, 2, True) for name in ("llama", "gemma", "mixtral", "deepseek", "llama 4")),
    ("llama", 1, 1, 3, False),
    ("llama", 2, 1, 2, True),
    ("mixtral", 4, 2, 3, True),
    ("mixtral", 2, 2, 2, False),
]
"""Likewise, with each stage but the first on another host."""


def config_of(directory, **fields):
    sizes = {"kv_pool_tokens": 4096, "max_batch_tokens": 96, "max_running": 8, "threads": 1, "lookup_tokens": 0}
    return EngineConfig(model=directory, **{**sizes, "draft_timeout_s": 30, "draft_always": True, **fields})


@pytest.mark.parametrize(
    ("name", "ranks", "groups", "stages", "kernels", "away"),
    [(*case, False) for case in CASES] + [(*case, True) for case in HOSTED],
)
async def test_split_engine_says_the_same(tmp_path, kit, name, ranks, groups, stages, kernels, away, monkeypatch):
    """Logprobs to 1e-4 in float32: prompts in chunks, together, with a prefix that an engine in one process has
    computed, and with drafts; and that engine goes on from what the split one has computed."""
    monkeypatch.setattr(distance, "PORTION", 20_000)  # else all is in one
    directory = write_checkpoint(tmp_path / "model", MODELS[name])
    config = config_of(directory, kernels=kernels)
    requests = kit.mixed()
    long = kit.request("long", 200, kit.greedy(12, logprobs=3))
    wrong = kit.Drafts(lambda ask: [(token + 1) % 256 if number == 2 else token for number, token in enumerate(right)])
    async with Engine.open(config) as whole:
        expected = await kit.read_all(whole, requests)
        alone = kit.Sink()
        said = await kit.read(whole, long, sink=alone)
    right = said.ids[:4]
    load = on_hosts(write_checkpoint(tmp_path / "there", MODELS[name])) if away else in_threads
    async with Engine.open(replace(config, tp=ranks, ep=groups, pp=stages), wrong, load) as split:
        assert split.spec == whole.spec
        for found, wanted in zip(await kit.read_all(split, requests), expected, strict=True):
            kit.assert_same(found, wanted)
        blocks = [alone.blocks[number] for number in range(9)]
        sink = kit.Sink()
        found = await kit.read(split, long, source=kit.Source(blocks), sink=sink)
        kit.assert_same(found, said)
        assert found.last.cached_tokens == 9 * 16
        cold = kit.Sink()
        kit.assert_same(await kit.read(split, kit.renamed(long, "cold"), sink=cold), said)
        assert split.stats().drafted > 0
        sparse = split.checkpoint.config.experts is not None
        if groups > 1:
            assert 1 <= split.expert_imbalance < groups
        else:
            assert split.expert_imbalance == float(sparse)
    assert len(cold.blocks) == len(alone.blocks) > 9
    async with Engine.open(config) as whole:
        blocks = [cold.blocks[number] for number in range(11)]
        again = await kit.read(whole, long, source=kit.Source(blocks))
        kit.assert_same(again, said)
        assert again.last.cached_tokens == 11 * 16


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}], ids=str)
async def test_killed_rank_takes_its_engine_out(tmp_path, kit, split):
    """Requests fail at once, as those of a worker that ends do, and new ones are refused."""
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    async with Engine.open(config_of(directory, **split)) as engine:
        request = kit.request("r", 20, kit.greedy(900))
        stream = engine.generate(request)
        await anext(stream)
        os.kill(engine._runner.ranks.pids[0], signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(EngineClosed):
                async for _ in stream:
                    pass
            await engine.lost.wait()
        with pytest.raises(EngineClosed):
            await kit.read(engine, kit.renamed(request, "later"))


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}], ids=str)
async def test_processes_say_the_same_and_end_with_the_engine(tmp_path, kit, split):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    async with Engine.open(config_of(directory)) as engine:
        expected = await kit.read_all(engine, kit.mixed())
    async with Engine.open(config_of(directory, **split)) as engine:
        for found, wanted in zip(await kit.read_all(engine, kit.mixed()), expected, strict=True):
            kit.assert_same(found, wanted)
        assert engine.arena is None, "no store maps the pages unless it is asked to"
        (pid,) = engine._runner.ranks.pids
        assert pid != os.getpid()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("heads", [range(1), range(1, 3)])
def test_window_is_those_heads_of_the_pages(tmp_path, dtype, heads):
    """What is stored through windows is what the pages gather, and the other way round."""
    model = inspect(write_checkpoint(tmp_path / "model", TinyModel(heads=4, kv_heads=4))).config
    whole, split = (PageMemory(model, 6, 16, dtype, torch.device("cpu")) for _ in range(2))
    windows = [PageWindow(split, part) for part in (range(heads.start), heads, range(heads.stop, 4)) if part]
    rows = torch.randn(40, 4, 16)
    places = torch.randperm(len(whole.vectors))[:40]
    whole.store(places, rows.flatten(1))
    for window, part in zip(
        windows, [part for part in (range(heads.start), heads, range(heads.stop, 4)) if part], strict=True
    ):
        window.store(places, rows[:, part.start : part.stop].flatten(1))
    assert torch.equal(whole.data, split.data)
    index = torch.tensor([12, 18, 13, 19])  # planes of two pages
    found = PageWindow(whole, heads).gather(index, 1, 30)
    for plane, wanted in zip(found, whole.gather(index, 1, 30), strict=True):
        assert torch.equal(plane, wanted[:, :, heads.start : heads.stop])


async def test_split_that_does_not_fit_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    with pytest.raises(ConfigError, match=r"tp .*must divide the 4 attention heads"):
        async with Engine.open(config_of(directory, tp=3)):
            pass
    with pytest.raises(ConfigError, match=r"pp .*must be at most the 3 layers"):
        async with Engine.open(config_of(directory, pp=4)):
            pass


async def test_steps_of_others_are_computed_meanwhile(tmp_path, kit):
    """Two stages compute two steps at a time, each of half of the streams; with few pages, so that some go back to the
    line, and with readers that leave meanwhile."""
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    requests = [kit.request(f"{number}", 20 + 9 * number, kit.greedy(40)) for number in range(8)]
    config = config_of(directory, draft_tokens=0, kv_pool_tokens=640)
    async with Engine.open(config) as whole:
        expected = await kit.read_all(whole, requests)
    flights = []
    async with Engine.open(replace(config, pp=2), load=in_threads) as split:
        finish = split._runner.finish

        def watched(begun):
            flights.append([len(flight.step) for flight in split._flights])
            return finish(begun)

        split._runner.finish = watched
        leaver = split.generate(kit.request("leaver", 30, kit.greedy(400)))
        await anext(leaver)
        reading = asyncio.create_task(kit.read_all(split, requests))
        await asyncio.sleep(0)
        await leaver.aclose()
        for found, wanted in zip(await reading, expected, strict=True):
            assert found.ids == wanted.ids
        assert split.stats().preemptions > 0
        stats = split.stats()
        assert stats.free_pages == stats.total_pages
    assert max(map(len, flights)) == 2
    assert any(len(steps) == 2 and min(steps) > 1 for steps in flights), "streams are shared"


def test_a_rank_tells_why_it_cannot_load_its_part(tmp_path):
    lead, theirs = socket.socketpair()
    nothing = SharedMemory("/nowhere", 0, b"")
    settings = settings_of(EngineConfig(model=tmp_path / "gone", tp=2))
    with lead, theirs:
        setup = Setup(1, 2, 0, [(0, 3)], settings, "", nothing, None, None, "")
        send(lead, msgspec.msgpack.encode(setup))
        with pytest.raises(CheckpointError, match="gone"):
            follow(theirs)
        assert b"a part of the model" in (told := receive(lead)) and b"gone: is not a directory" in told
