"""A weight that is not a number: the requests that meet it fail with a clear error, the others go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import NotFinite
from penstock.engine.request import Request
from penstock.testing.checkpoints import TinyModel, write_checkpoint

SPOILT = 77
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(params=[np.nan, np.inf])
def damaged(request, tmp_path):
    """The embedding of one token is not a number."""
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    tensors = load_file(directory / "model.safetensors")
    tensors[EMBEDDING][SPOILT, 3] = request.param
    save_file(tensors, directory / "model.safetensors")
    return EngineConfig(model=directory, kv_pool_tokens=4096, threads=1)


@pytest.mark.parametrize("kernels", [True, False])
async def test_only_those_that_meet_it_fail(damaged, kit, kernels):
    prompts = [tuple(1 + (7 * at + number) % 70 for at in range(30)) for number in range(7)]
    spoilt = {2: (*prompts[2][:10], SPOILT, *prompts[2][10:]), 5: (*prompts[5], SPOILT)}
    banned = {SPOILT: -100.0}
    plain = [
        Request(f"r{at}", prompt, kit.greedy(10) if at % 2 else kit.seeded(at, 10, logprobs=at, logit_bias=banned))
        for at, prompt in enumerate(prompts)
    ]
    mixed = [replace(one, prompt=spoilt.get(at, one.prompt)) for at, one in enumerate(plain)]
    async with Engine.open(replace(damaged, kernels=kernels)) as engine:
        expected = await kit.read_all(engine, plain)
        found = await asyncio.gather(*[kit.read(engine, one) for one in mixed], return_exceptions=True)
        for at, (one, other) in enumerate(zip(expected, found, strict=True)):
            if at in spoilt:
                assert isinstance(other, NotFinite) and "not finite" in str(other)
            else:
                kit.assert_same(one, other)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.total_pages)
        for one, other in zip(expected, await kit.read_all(engine, plain), strict=True):
            kit.assert_same(one, other)  # nothing of it is left in pages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
async def test_a_damaged_norm_fails_every_request(tmp_path, kit, dtype):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][5] = np.nan
    save_file(tensors, directory / "model.safetensors")
    async with Engine.open(EngineConfig(model=directory, dtype=dtype, kv_pool_tokens=1024, threads=1)) as engine:
        for sampling in (kit.greedy(5), kit.seeded(1, 5), kit.seeded(1, 5, top_k=3, logprobs=2)):
            with pytest.raises(NotFinite):
                await kit.read(engine, kit.request("a", 20, sampling))
