"""What can't be computed is refused before anything is loaded, by field, value and what is possible."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward import runner
from penstock.engine.kernels.cpu.build import NotBuilt
from penstock.runtime.config import ConfigError
from penstock.testing.checkpoints import TinyModel, write_checkpoint

MIXTRAL = {
    "architecture": "MixtralForCausalLM",
    "extra": {"num_local_experts": 3, "num_experts_per_tok": 2},
}
QWEN = {
    "architecture": "Qwen3MoeForCausalLM",
    "extra": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
LOSSLESS = {"dtype": "bfloat16", "weights": "lossless"}


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
@pytest.mark.parametrize("dtype", ["int8", "float8"])
async def test_experts_are_not_rounded_on_a_cuda_device(tmp_path, model, dtype):
    config = EngineConfig(model=write_checkpoint(tmp_path, TinyModel(**model)), dtype=dtype, device="cuda")
    said = f"dtype = '{dtype}': is not possible for a model with experts on cuda: use bfloat16"
    with pytest.raises(ConfigError, match=said):
        async with Engine.open(config):
            pytest.fail("it opened")


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
async def test_experts_are_served_in_all_kinds_of_weights(tmp_path, kit, model):
    """With the kernels and without; lossless weights give the tokens of plain ones."""
    config = EngineConfig(
        model=write_checkpoint(tmp_path, TinyModel(**model)), kv_pool_tokens=1024, kv_dtype="float32", threads=2
    )
    said = {}
    for dtype, weights in (("float32", "plain"), ("bfloat16", "plain"), ("bfloat16", "lossless"), ("int8", "plain")):
        for kernels in (True, False):
            if weights == "lossless" and not kernels:
                continue
            own = replace(config, dtype=dtype, weights=weights, kernels=kernels)
            async with Engine.open(own) as engine:
                answer = await kit.read(engine, kit.request("a", 40, kit.greedy(8)))
            said[dtype, weights, kernels] = answer.ids
    assert {len(ids) for ids in said.values()} == {8}
    assert said["float32", "plain", True] == said["float32", "plain", False]
    assert said["bfloat16", "plain", True] == said["bfloat16", "lossless", True]


@pytest.mark.parametrize("size", [{"hidden_size": 201}, {"intermediate_size": 333}, {"heads": 3, "head_dim": 24}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
async def test_odd_sizes_are_served(tmp_path, kit, size, dtype):
    """By the kernels, or by torch where they can't; the same tokens as without kernels."""
    fields = {"kv_heads": 1, **size}
    config = EngineConfig(
        model=write_checkpoint(tmp_path, TinyModel(**fields)), dtype=dtype, kv_pool_tokens=1024, threads=1
    )
    answers = []
    for kernels in (True, False):
        async with Engine.open(replace(config, kernels=kernels)) as engine:
            answers.append((await kit.read(engine, kit.request("a", 40, kit.greedy(12)))).ids)
    assert len(answers[0]) == 12
    if dtype == "float32":
        assert answers[0] == answers[1]


@pytest.mark.parametrize("size", [{"hidden_size": 201}, {"intermediate_size": 333}])
async def test_lossless_weights_of_odd_sizes_are_refused(tmp_path, size):
    config = EngineConfig(model=write_checkpoint(tmp_path, TinyModel(**size)), **LOSSLESS)
    [(name, value)] = size.items()
    with pytest.raises(ConfigError, match=rf"weights = 'lossless': .*{name} is {value}: use plain"):
        async with Engine.open(config):
            pytest.fail("it opened")


async def test_lossless_weights_without_kernels_are_refused(config, monkeypatch):
    """Plain ones instead would take more memory than the operator counted on."""
    with pytest.raises(ConfigError, match="the kernels are switched off: use plain"):
        async with Engine.open(replace(config, kernels=False, **LOSSLESS)):
            pytest.fail("it opened")

    def not_built(threads):
        raise NotBuilt("there is no compiler")

    monkeypatch.setattr(runner, "Machine", not_built)
    with pytest.raises(ConfigError, match="needs the C\\+\\+ kernels: there is no compiler; or use plain"):
        async with Engine.open(replace(config, **LOSSLESS)):
            pytest.fail("it opened")


def test_commands_refuse_before_anything_is_ready(tmp_path):
    """`penstock up` before a process starts, a worker before it says where it listens."""
    model = str(write_checkpoint(tmp_path / "moe", TinyModel(**MIXTRAL)))
    for service in ("up", "prefill", "decode"):
        settings = ("--model", model, "--dtype", "int8", "--device", "cuda")
        command = (sys.executable, "-m", "penstock.cli", service, *settings)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2)
        assert "dtype = 'int8': is not possible for a model with experts on cuda" in done.stderr
        assert "Traceback" not in done.stderr and "ready" not in done.stdout + done.stderr
