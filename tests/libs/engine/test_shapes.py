"""Models of sizes that no kernel likes: what is said before loading is what holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.checkpoint import ModelConfig, inspect
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.kernels.cpu.shapes import misfit
from penstock.engine.layers.stacks import Stack
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loading import load_weights
from penstock.engine.models.packed import packed_weights
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.batch import BatchBuilder
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.testing.checkpoints import TinyModel, write_checkpoint

EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
CPU = torch.device("cpu")


def config_of(directory: Path, **fields) -> ModelConfig:
    return inspect(write_checkpoint(directory / "model", TinyModel(**fields))).config


def logits(directory: Path, kind: str | None) -> torch.Tensor:
    """Of a prompt's last token, with packed matrices of this kind, or by torch alone."""
    checkpoint = inspect(directory)
    config, machine = checkpoint.config, Machine(2)
    packed = None if kind is None else packed_weights(checkpoint, kind, torch.float32, 1, 0)

    def keep(stack: Stack, matrix, bias):
        if packed is None:
            return matrix(), bias
        return PackedMatrix.of(machine, packed.matrices[stack.name], bias, stack.columns), None

    memory = PageMemory(config, 8, 16, torch.float32, CPU)
    decoder = Decoder(config, load_weights(checkpoint, torch.float32, CPU, keep=keep), 128, torch.float32)
    builder = BatchBuilder(memory, CPU, config.windows, torch.float32)
    tokens = [(7 * number) % 256 for number in range(21)]
    choice = Choice(SamplingParams(max_tokens=4, temperature=0.0), frozenset(), tokens, 21)
    with torch.inference_mode():
        return decoder.forward(builder.build([Run(choice, 0, 21, [1, 2], ("one", 0))]), memory)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "lossless"])
@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 66, "intermediate_size": 90},
        {"heads": 6, "kv_heads": 3, "head_dim": 12},
        {"heads": 3, "kv_heads": 1, "head_dim": 6, "hidden_size": 34},
        {"vocab_size": 301, "heads": 5, "kv_heads": 5, "head_dim": 18, "architecture": "Qwen2ForCausalLM"},
        {"hidden_size": 34, "intermediate_size": 50, "architecture": "MixtralForCausalLM", "extra": EXPERTS},
    ],
)
def test_what_fits_is_computed(tmp_path, fields, kind):
    directory = write_checkpoint(tmp_path / "model", TinyModel(**fields))
    config = inspect(directory).config
    assert misfit(config) is None
    found, expected = logits(directory, kind), logits(directory, None)
    apart = float((found - expected).abs().mean() / expected.abs().mean())
    assert apart < (1e-5 if kind == "float32" else 0.1)


@pytest.mark.parametrize("fields", [{"hidden_size": 333}, {"intermediate_size": 201}])
def test_what_does_not_fit_is_named(tmp_path, fields):
    (name, size), config = next(iter(fields.items())), config_of(tmp_path, **fields)
    assert misfit(config) == f"the kernels read inputs in pairs, and {name} is {size}"


def test_so_are_experts_that_do_not_fit(tmp_path):
    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 33}
    config = config_of(tmp_path, architecture="Qwen3MoeForCausalLM", extra=more)
    assert misfit(config) == "the kernels read inputs in pairs, and moe_intermediate_size is 33"
