"""Ranks on CUDA devices say what one process on a CPU says: two on one GPU, or each on a GPU of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineClosed
from penstock.engine.kernels.cuda import setup
from penstock.engine.request import Request, SamplingParams
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TINY_LLAMA_4, TinyModel, write_checkpoint

MODELS = {
    "llama": TinyModel(),
    "one KV head": TinyModel(kv_heads=1),
    "gemma": TinyModel("Gemma2ForCausalLM", layers=2, extra={"sliding_window": 24}),
    "mixtral": TinyModel("MixtralForCausalLM", extra={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "latent": DEEPSEEK_IN_VECTORS,
    "llama 4": TINY_LLAMA_4,
}
SPLITS = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]
START_S, END_S = 180, 60


@pytest.fixture(params=["one GPU", "a GPU each"])
def devices(request):
    """Settings, for so many processes."""

    def of(processes: int) -> dict[str, object]:
        if request.param == "one GPU":
            return {"device": "cuda", "one_device": True}
        if (there := torch.cuda.device_count()) < processes:
            pytest.skip(f"needs {processes} GPUs, there are {there}")
        return {"device": "cuda"}

    return of


def config_of(directory: Path, **fields) -> EngineConfig:
    sizes = {"kv_pool_tokens": 2048, "max_batch_tokens": 48, "max_running": 6, "threads": 1}
    return EngineConfig(directory, **{"dtype": "float32", **sizes, **fields})


async def answers(config: EngineConfig, turns: int = 2) -> list[list[int]]:
    """Of texts in chunks, side by side, and of texts that go on behind them."""

    async def one(engine: Engine, number: int, turn: int) -> list[int]:
        sampling = SamplingParams(max_tokens=24, temperature=0.8 if number == 1 else 0.0, seed=number)
        prompt = [(number * 31 + 7 * at) % 250 for at in range((20 + 40 * turn) * (1 + number))]
        found = []
        async for update in engine.generate(Request(f"{number} {turn}", prompt, sampling)):
            found += [token.token for token in update.tokens]
        return found

    async with asyncio.timeout(START_S), Engine.open(config) as engine:
        return [
            each for turn in range(turns) for each in await asyncio.gather(*(one(engine, n, turn) for n in range(3)))
        ]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
async def test_float32_tokens_are_those_of_the_cpu(tmp_path, devices, name, split):
    directory = write_checkpoint(tmp_path / "model", MODELS[name])
    placed = devices(split.get("tp", 1) * split.get("pp", 1))
    expected = await answers(config_of(directory, kernels=False))
    assert await answers(config_of(directory, **split, **placed)) == expected


async def test_whole_experts_in_groups(tmp_path, devices):
    directory = write_checkpoint(tmp_path / "model", MODELS["mixtral"])
    placed = devices(2)
    expected = await answers(config_of(directory, kernels=False))
    assert await answers(config_of(directory, tp=2, ep=2, **placed)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8"])
async def test_other_types_run(tmp_path, devices, dtype):
    """And say the same twice."""
    placed = devices(2)
    try:
        setup.check(dtype, torch.device("cuda"))
        setup.keep_for(dtype, torch.device("cuda"))
    except ValueError as reason:
        pytest.skip(str(reason))
    model = TinyModel(hidden_size=128, intermediate_size=256, heads=4, kv_heads=2, head_dim=64)
    config = config_of(write_checkpoint(tmp_path / "model", model), dtype=dtype, tp=2, **placed)
    assert await answers(config, 1) == await answers(config, 1)


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}], ids=str)
async def test_killed_rank_takes_its_engine_out(tmp_path, devices, split):
    """Rank 0 waits on its device for the other one, and hears of it."""
    config = config_of(write_checkpoint(tmp_path / "model", TinyModel()), **split, **devices(2))
    async with asyncio.timeout(START_S), Engine.open(config) as engine:
        sampling = SamplingParams(max_tokens=900, temperature=0.0)
        stream = engine.generate(Request("r", list(range(20)), sampling))
        await anext(stream)
        os.kill(engine._runner.ranks.pids[0], signal.SIGKILL)
        async with asyncio.timeout(END_S):
            with pytest.raises(EngineClosed):
                async for _ in stream:
                    pass
            await engine.lost.wait()
