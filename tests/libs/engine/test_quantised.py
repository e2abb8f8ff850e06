"""Checkpoints whose matrices are stored in 8 or 4 bits compute what their numbers stand for."""

from __future__ import annotations

import json
import math
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint import CheckpointError, fingerprint, inspect
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cpu.build import NotBuilt
from penstock.engine.kernels.cpu.pack import unpack
from penstock.engine.models.loading import all_stacks
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.runtime.config import ConfigError
from penstock.testing.checkpoints import write_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

BLOCK, GROUP = 16, 8
FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def int4_of(group):
    weights = {**WEIGHTS, "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "input_activations": None, "targets": ["Linear"]}},
    }


INT4 = int4_of(GROUP)
PROMPT = [7, 200, 31, 5, 5, 91, 120, 64, 33, 2, 250, 17, 18, 19, 20, 21, 22, 23]


def in_float8(name, matrix):
    """The stored tensors, and the numbers that they stand for, one number at a time."""
    rows, columns = (math.ceil(extent / BLOCK) for extent in matrix.shape)
    scale, stored = torch.zeros(rows, columns), torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn)
    meant = torch.zeros_like(matrix)
    for row in range(rows):
        for column in range(columns):
            own = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scale[row, column] = matrix[own].abs().max() / 448
            stored[own] = (matrix[own] / scale[row, column]).to(torch.float8_e4m3fn)
            meant[own] = stored[own].float() * scale[row, column]
    return {name: stored, f"{name}_scale_inv": scale}, meant


def in_int4(name, matrix, group=GROUP):
    rows, columns = matrix.shape
    scale, meant = torch.zeros(rows, columns // group), torch.zeros(matrix.shape)
    words = [[0] * (columns // 8) for _ in range(rows)]
    for row in range(rows):
        for first in range(0, columns, group):
            own = matrix[row, first : first + group]
            step = float((own.abs().max() / 7).bfloat16())
            scale[row, first // group] = step
            for at, number in enumerate(own.tolist(), first):
                level = max(-8, min(7, round(number / step)))
                words[row][at // 8] |= (level + 8) << (4 * (at % 8))
                meant[row, at] = level * step
    signed = [[word - (1 << 32) if word >= 1 << 31 else word for word in row] for row in words]
    packed = torch.tensor(signed, dtype=torch.int64).to(torch.int32)
    parts = {
        f"{name}_packed": packed,
        f"{name}_scale": scale.bfloat16(),
        f"{name}_shape": torch.tensor([rows, columns]),
    }
    return parts, meant


@pytest.fixture(scope="module")
def drawn():
    """A small model of transformers with latent attention and experts, and its tensors as published files name them."""
    torch.manual_seed(3)
    config = transformers.DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.DeepseekV3ForCausalLM(config).eval()


def written(directory, model, quantise, quantisation, which):
    """A checkpoint in which the matrices that `which` picks are quantised; the model that its numbers stand for."""
    model.save_pretrained(directory)
    write_tokenizer(directory / "tokenizer.json")
    file, stored, meant = directory / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        meant[name] = tensor
        if which(name, tensor):
            parts, meant[name] = quantise(name, tensor)
            stored |= parts
        else:
            stored[name] = tensor
    save_file(meant, file, metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    save_file(stored, file, metadata={"format": "pt"})
    edit(directory, quantization_config=quantisation)
    return oracle


def edit(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def dense(name, tensor):
    return "proj" in name and name.endswith(".weight")


def of_experts(name, tensor):
    return ".experts." in name


def logits_of(directory, dtype="float32", kernels=True):
    config = EngineConfig(model=directory, dtype=dtype, kv_pool_tokens=64, kernels=kernels)
    runner = Runner(inspect(directory), config)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    choice = Choice(params, frozenset(), PROMPT[:1], 1, tuple(PROMPT[1:]))
    return runner.logits([Run(choice, 0, 1, [1, 2], ("one", 0))])


@pytest.mark.parametrize(
    ("quantise", "quantisation", "which"), [(in_float8, FLOAT8, dense), (in_int4, INT4, of_experts)]
)
def test_numbers_are_what_the_bits_stand_for(tmp_path, drawn, quantise, quantisation, which):
    oracle = written(tmp_path, drawn, quantise, quantisation, which)
    with torch.inference_mode():
        wanted, plain = (model(torch.tensor([PROMPT])).logits[0] for model in (oracle, drawn))
    torch.testing.assert_close(logits_of(tmp_path), wanted, atol=1e-4, rtol=0)
    assert (wanted - plain).abs().max() > 1e-2, "the quantisation is to be seen"
    assert logits_of(tmp_path, "bfloat16").isfinite().all()


def test_kernels_pack_float8_too(tmp_path):
    """A dense model is packed for the kernels from the numbers that its bits stand for."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = written(tmp_path, transformers.LlamaForCausalLM(config).eval(), in_float8, FLOAT8, dense)
    runner = Runner(inspect(tmp_path), EngineConfig(model=tmp_path, dtype="float32", kv_pool_tokens=64))
    assert runner.packed is not None
    with torch.inference_mode():
        wanted = oracle(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path), wanted, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def wide_int4(tmp_path_factory):
    """A checkpoint with experts in int4 groups of 32, and the model that its numbers stand for."""
    torch.manual_seed(5)
    config = transformers.MixtralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    directory = tmp_path_factory.mktemp("int4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.MixtralForCausalLM(config).eval().bfloat16()
        oracle = written(directory, model, partial(in_int4, group=32), int4_of(32), of_experts)
    return directory, oracle


def test_int4_keeps_the_bits_of_the_checkpoint(wide_int4):
    """Its experts are the same numbers, and no other matrix is rounded further."""
    directory, oracle = wide_int4
    checkpoint = inspect(directory)
    runner = Runner(checkpoint, EngineConfig(model=directory, dtype="int4", kv_pool_tokens=64))
    assert runner.packed is not None
    kinds = {name: packed.kind for name, packed in runner.packed.matrices.items()}
    assert {kind for name, kind in kinds.items() if name.count(".") == 2} == {"int4"}
    assert {kind for name, kind in kinds.items() if name.count(".") < 2} == {"bfloat16"}
    meant = dict(oracle.named_parameters())
    for stack in all_stacks(checkpoint):
        if kinds[stack.name] == "int4":
            number, _, expert = stack.name.split(".")
            name = f"model.layers.{number}.mlp.experts.{'gate_up' if 'gate_up' in stack.name else 'down'}_proj"
            assert torch.equal(unpack(runner.packed.matrices[stack.name], stack.columns).t(), meant[name][int(expert)])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_unpacks_int4(wide_int4, device):
    """Blocks of workers with and without a GPU are interchangeable."""
    directory, _ = wide_int4
    assert settled(EngineConfig(model=directory, device=device), inspect(directory)).identity == "bfloat16"


@pytest.mark.parametrize("kernels", [True, False])
def test_and_computes_with_them(wide_int4, kernels):
    directory, oracle = wide_int4
    with torch.inference_mode():
        wanted = oracle(torch.tensor([PROMPT])).logits[0]
    found = logits_of(directory, "int4", kernels)
    assert (found - wanted).abs().mean() < 0.02 * wanted.abs().mean(), "rows and KV are in bfloat16"


def test_without_a_compiler_they_take_no_more_than_bfloat16(wide_int4, monkeypatch, caplog):
    directory, oracle = wide_int4

    def not_built(threads):
        raise NotBuilt("there is no compiler")

    monkeypatch.setattr("penstock.engine.forward.runner.Machine", not_built)
    found = Runner(inspect(directory), EngineConfig(model=directory, dtype="int4", kv_pool_tokens=64))
    assert "int4 matrices are kept in bfloat16" in caplog.text
    weights, meant = found.decoder._weights, dict(oracle.named_parameters())
    layer = weights.layers[0]
    assert layer.qkv.dtype == layer.mlp.down[0].dtype == weights.head.dtype == torch.bfloat16
    stored = meant["model.layers.0.mlp.experts.down_proj"][0].t()
    assert torch.equal(layer.mlp.down[0], stored.bfloat16())
    with torch.inference_mode():
        wanted = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(directory, "int4") - wanted).abs().mean() < 0.05 * wanted.abs().mean(), "sums are rounded too"


def test_int4_of_other_groups_is_not_kept(tmp_path, drawn):
    written(tmp_path, drawn, in_int4, INT4, of_experts)
    assert settled(EngineConfig(model=tmp_path), inspect(tmp_path)).dtype == "float32"
    with pytest.raises(ConfigError, match=r"dtype = 'int4': keeps groups of 32 numbers .*: use int8 or bfloat16"):
        settled(EngineConfig(model=tmp_path, dtype="int4"), inspect(tmp_path))


def test_a_checkpoint_with_no_matrix_in_int4_is_rounded(tmp_path, drawn):
    """Whatever its config.json says of others."""
    written(tmp_path, drawn, in_int4, INT4, lambda name, tensor: False)
    checkpoint = inspect(tmp_path)
    assert checkpoint.quantisation is not None and not checkpoint.stores_int4
    runner = Runner(checkpoint, EngineConfig(model=tmp_path, dtype="int4", kv_pool_tokens=64))
    assert runner.packed is not None
    kinds = {name: packed.kind for name, packed in runner.packed.matrices.items()}
    of_heads = {kinds.pop(name) for name in list(kinds) if name.endswith((".keys", ".values"))}
    assert (kinds.pop("head"), of_heads, set(kinds.values())) == ("int8", {"bfloat16"}, {"int4"})


def test_the_grid_is_part_of_the_fingerprint(tmp_path, drawn):
    written(tmp_path, drawn, in_float8, FLOAT8, lambda name, tensor: dense(name, tensor) and max(tensor.shape) <= 16)
    before = fingerprint(tmp_path)
    edit(tmp_path, quantization_config={**FLOAT8, "weight_block_size": [64, 64]})
    assert fingerprint(tmp_path) != before


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path, drawn):
    drawn.save_pretrained(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json")
    wanted = logits_of(tmp_path)
    file = tmp_path / "model.safetensors"
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.enorm.weight": torch.ones(32)}
    save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    edit(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(logits_of(tmp_path), wanted)
    edit(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"tensor model.layers.2.\w+.weight is not part of DeepseekV3"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported, only fp8"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only e4m3"),
        ({"weight_block_size": [16]}, "weight_block_size must be two sizes"),
        ({"weight_block_size": [16, 32]}, r"with a scale for each 16 x 32 it must be"),
        ({"weight_block_size": None}, "weight_block_size must be two sizes"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path, drawn, changes, reason):
    written(tmp_path, drawn, in_float8, FLOAT8, dense)
    edit(tmp_path, quantization_config={**FLOAT8, **changes})
    with pytest.raises(CheckpointError, match=reason):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"num_bits": 8}, "num_bits 8 is not supported, only 4"),
        ({"symmetric": False}, "symmetric False is not supported, only True"),
        ({"strategy": "channel"}, "strategy 'channel' is not supported"),
        ({"group_size": 12}, "group_size must be a multiple of 8, not 12"),
        ({"group_size": 16}, r"with a scale for each 1 x 16 it must be"),
    ],
)
def test_int4_of_another_kind_is_refused(tmp_path, drawn, weights, reason):
    written(tmp_path, drawn, in_int4, INT4, of_experts)
    groups = {"group_0": {**INT4["config_groups"]["group_0"], "weights": {**WEIGHTS, **weights}}}
    edit(tmp_path, quantization_config={**INT4, "config_groups": groups})
    with pytest.raises(CheckpointError, match=reason):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("quantise", "quantisation", "which", "gone", "reason"),
    [
        (in_float8, FLOAT8, dense, "_scale_inv", "is F8_E4M3, and its scales are missing"),
        (in_int4, INT4, of_experts, "_scale", "_packed is there, and .*_scale is not"),
        (in_int4, INT4, of_experts, "_packed", "experts.*weight of DeepseekV3ForCausalLM is missing"),
    ],
)
def test_a_part_that_is_missing_is_named(tmp_path, drawn, quantise, quantisation, which, gone, reason):
    written(tmp_path, drawn, quantise, quantisation, which)
    file = tmp_path / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(gone)}
    save_file(left, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=reason):
        inspect(tmp_path)
