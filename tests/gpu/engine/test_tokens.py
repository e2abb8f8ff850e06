"""The engine on a CUDA device gives the tokens it gives on a CPU, captured or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.libs.engine.cuda.test_steps import BLOCK, PAGES, play, run_of

from penstock.checkpoint import SUPPORTED, inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cuda import setup
from penstock.engine.kernels.cuda.steps import DeviceSteps
from penstock.engine.request import Request, SamplingParams
from penstock.testing.checkpoints import TinyModel, write_checkpoint

EXTRA = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 20}

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.05, "float8": 0.2}


def config_of(directory: Path, **fields) -> EngineConfig:
    return EngineConfig(model=directory, kv_pool_tokens=PAGES * BLOCK, block_size=BLOCK, max_model_len=160, **fields)


def on_device(directory, dtype, kernels=True, graphs=True):
    runner = Runner(
        inspect(directory), config_of(directory, dtype=dtype, device="cuda", kernels=kernels, max_running=6)
    )
    if kernels and not graphs:
        attention = runner._device._attention
        runner._device = DeviceSteps(
            runner.decoder, runner.memory, runner._builder, attention, capture=None, most_sequences=6, max_positions=160
        )
    return runner


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_float32_tokens_are_those_of_the_cpu(tmp_path, architecture, kernels):
    directory = write_checkpoint(tmp_path / "model", TinyModel(architecture, extra=EXTRA))
    expected = play(Runner(inspect(directory), config_of(directory, kernels=False)))
    assert play(on_device(directory, "float32", kernels)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8"])
def test_captured_steps_are_the_steps(tmp_path, dtype):
    """Near enough: the library of products may choose another one in a capture."""
    try:
        setup.check(dtype, torch.device("cuda"))
        setup.keep_for(dtype, torch.device("cuda"))
    except ValueError as reason:
        pytest.skip(str(reason))
    directory = write_checkpoint(tmp_path / "model", TinyModel(hidden_size=128, heads=2, kv_heads=1, head_dim=64))
    eager, captured = on_device(directory, dtype, graphs=False), on_device(directory, dtype)
    if captured._device._attention is None:
        pytest.skip("no paged attention on this device")
    generator = torch.Generator("cuda").manual_seed(1)
    content = torch.randn(captured.memory.data.shape, generator=generator, device="cuda")
    for runner in (eager, captured):
        runner.memory.data[1:PAGES] = content[1:PAGES].to(runner.memory.data.dtype)
    tokens = [(7 * at) % 251 for at in range(60)]
    for count, drafts in ((4, ()), (2, (5, 6)), (4, ()), (1, ()), (4, ())):
        runs = [
            run_of(tokens[: 50 - 9 * at], 49 - 9 * at, 1, list(range(1 + 8 * at, 9 + 8 * at)), drafts, 2 * at)
            for at in range(count)
        ]
        with torch.inference_mode():
            right = eager.logits(runs).clone()
            for _ in range(3):
                torch.testing.assert_close(captured.logits(runs), right, atol=TOLERANCE[dtype], rtol=0)
    assert len(captured._device._graphs._steps) == 3
    assert not captured.memory.data[0].any(), "page 0 stays zero"


async def answers(directory, device, dtype, draft=0):
    config = EngineConfig(directory, dtype=dtype, device=device, kv_pool_tokens=2048, max_running=6)
    async with Engine.open(config) as engine:
        texts = []
        for seed, temperature in ((1, 0.0), (2, 0.8), (3, 0.0)):
            sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=seed)
            request = Request(str(seed), [(seed * 31 + 7 * at) % 250 for at in range(20 * seed)], sampling)
            tokens = []
            async for update in engine.generate(request):
                tokens += [token.token for token in update.tokens]
            texts.append(tokens)
        return texts


async def test_an_engine_says_the_same(tmp_path):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    assert await answers(directory, "cuda", "float32") == await answers(directory, "cpu", "float32")
