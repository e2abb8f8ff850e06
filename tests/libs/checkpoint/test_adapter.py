"""Directories of LoRA adapters: what is read of them, and what is refused, by the name of the field or tensor."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.checkpoint import (
    CheckpointError,
    Rank,
    TensorCut,
    adapter_of_rank,
    inspect,
    inspect_adapter,
    patterns,
)
from penstock.testing.adapters import write_adapter
from penstock.testing.checkpoints import TinyModel, write_checkpoint

PREFIX = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "llama", TinyModel(layers=2))


@pytest.fixture(scope="module")
def config(model):
    return inspect(model).config


@pytest.fixture
def adapter(model, tmp_path):
    return write_adapter(tmp_path / "adapter", model)


def change(adapter, **fields):
    """Other settings; a field that is None is left out."""
    file = adapter / "adapter_config.json"
    values = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return adapter


def rewrite(adapter, work):
    """Other tensors."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    work(tensors)
    save_file(tensors, file)
    return adapter


def test_all_matrices_of_a_layer_have_their_places(adapter, config):
    found = inspect_adapter(adapter, config)
    first = [(part.stack, part.first, part.columns, part.rank, part.scale) for part in found.parts if part.layer == 0]
    assert first == [
        ("qkv", 0, 64, 4, 2.0),
        ("qkv", 64, 32, 4, 2.0),
        ("qkv", 96, 32, 4, 2.0),
        ("out", 0, 64, 4, 2.0),
        ("gate_up", 0, 96, 4, 2.0),
        ("gate_up", 96, 96, 4, 2.0),
        ("down", 0, 64, 4, 2.0),
    ]
    assert len(found.parts) == 14
    sizes = 4 * (64 + 64) * 2 + 4 * (64 + 32) * 2 + 4 * (64 + 96) * 3
    assert found.numbers == 2 * sizes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lora_alpha": 6}, 6 / 4),
        ({"lora_alpha": 6, "use_rslora": True}, 3.0),
        ({"alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 10}}, 2.5),
        ({"alpha_pattern": {"k_proj": 12, "elf_attn.q_proj": 12}}, 2.0),  # a pattern begins at a dot
    ],
)
def test_scales(adapter, config, fields, expected):
    assert inspect_adapter(change(adapter, **fields), config).parts[0].scale == pytest.approx(expected)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(q|k|v|o|gate|up|down)_proj",
        ["q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "up_proj", "down_proj"],
    ],
)
def test_ways_to_name_matrices(adapter, config, targets):
    """All of them name what the tensors are."""
    assert len(inspect_adapter(change(adapter, target_modules=targets), config).parts) == 14


def test_some_layers_and_some_matrices(adapter, config):
    change(adapter, layers_to_transform=[1], exclude_modules=["o_proj"])

    def work(tensors):
        for name in list(tensors):
            if ".layers.0." in name or "o_proj" in name:
                del tensors[name]

    found = inspect_adapter(rewrite(adapter, work), config)
    assert {part.layer for part in found.parts} == {1} and len(found.parts) == 6


def test_ranks_by_pattern(model, tmp_path, config):
    adapter = write_adapter(tmp_path / "other", model, rank_pattern={"q_proj": 7, "layers.1.mlp.down_proj": 1})
    ranks = {(part.layer, part.stack, part.first): part.rank for part in inspect_adapter(adapter, config).parts}
    assert (ranks[0, "qkv", 0], ranks[0, "qkv", 64], ranks[0, "down", 0], ranks[1, "down", 0]) == (7, 4, 4, 1)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported, only LORA"),
        ({"bias": "all"}, "bias 'all' is not supported, only none"),
        ({"use_dora": True}, "use_dora True: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["down_proj"]}, "target_parameters 'down_proj': only parameters of experts and routers"),
        ({"target_parameters": "down_proj"}, "target_parameters must be a list of names"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"r": 0}, "r must be a positive integer, not 0"),
        ({"r": 4096}, r"the rank of model\.layers\.0\.self_attn\.q_proj must be from 1 to 1024, not 4096"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"target_modules": None}, "target_modules must be a list of names"),
        ({"target_modules": ["nothing"]}, "target_modules does not name this matrix"),
        ({"target_modules": "*"}, "target_modules .* is no regular expression"),
        ({"exclude_modules": "(.+)+x"}, r"exclude_modules .* takes more than 0.5 s on the names"),
        ({"rank_pattern": {"(.+)+x": 2}}, r"rank_pattern .* takes more than 0.5 s on the names"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern '\(' is no regular expression"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern must give 'q_proj' a positive number"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"layers_to_transform": "all"}, "layers_to_transform must be a number or numbers"),
    ],
)
def test_settings_that_are_refused(adapter, config, fields, what, monkeypatch):
    monkeypatch.setattr(patterns, "LIMIT_S", 0.5)
    with pytest.raises(CheckpointError, match=what) as refused:
        inspect_adapter(change(adapter, **fields), config)
    assert refused.value.file.parent == adapter


def drop(name):
    return lambda tensors: tensors.pop(f"{PREFIX}.1.mlp.up_proj.{name}.weight")


def put(name, *shape):
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (drop("lora_A"), f"tensor {PREFIX}.1.mlp.up_proj.lora_A.weight is missing"),
        (drop("lora_B"), f"tensor {PREFIX}.1.mlp.up_proj.lora_B.weight is missing"),
        (put(f"{PREFIX}.0.self_attn.q_proj.lora_A.weight", 4, 65), r"has shape \[4, 65\], .* make it \[4, 64\]"),
        (put(f"{PREFIX}.0.self_attn.q_proj.lora_B.weight", 64, 5), r"has shape \[64, 5\], .* make it \[64, 4\]"),
        (put("base_model.model.lm_head.lora_A.weight", 4, 64), "an adapted last matrix is not supported"),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 9), "adapted embeddings are not supported"),
        (put(f"{PREFIX}.7.self_attn.q_proj.lora_A.weight", 4, 64), "LlamaForCausalLM has no such matrix"),
        (put(f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", 4), "is neither a lora_A nor a lora_B"),
        (put("model.layers.0.self_attn.q_proj.lora_A.weight", 4, 64), r"does not begin with base_model\.model\."),
    ],
)
def test_tensors_that_are_refused(adapter, config, work, what):
    with pytest.raises(CheckpointError, match=what):
        inspect_adapter(rewrite(adapter, work), config)


def test_files_that_are_refused(adapter, config, tmp_path):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is pickled"):
        inspect_adapter(adapter, config)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: the file is missing"):
        inspect_adapter(tmp_path, config)
    with pytest.raises(CheckpointError, match="is not a directory"):
        inspect_adapter(tmp_path / "nowhere", config)


def test_an_adapter_of_another_model_is_refused(adapter, tmp_path):
    other = write_checkpoint(tmp_path / "other", TinyModel(layers=2, intermediate_size=128))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.lora_B\.weight has shape \[96, 4\]"):
        inspect_adapter(adapter, inspect(other).config)


MIXTRAL = TinyModel(
    "MixtralForCausalLM", layers=1, extra={"num_local_experts": 4, "num_experts_per_tok": 2}, intermediate_size=48
)
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


@pytest.fixture
def mixtral(tmp_path):
    return write_checkpoint(tmp_path / "mixtral", MIXTRAL)


def test_experts_that_are_modules(mixtral, tmp_path):
    targets = ("gate", "w1", "w2", "w3")
    adapter = write_adapter(tmp_path / "adapter", mixtral, targets=targets, experts=True)
    found = inspect_adapter(adapter, inspect(mixtral).config)
    assert [(part.stack, part.first, part.columns, part.expert) for part in found.parts] == [
        ("router", 0, 4, None),
        *(
            place
            for expert in range(4)
            for place in (
                (f"gate_up.{expert}", 0, 48, expert),
                (f"gate_up.{expert}", 48, 48, expert),
                (f"down.{expert}", 0, 64, expert),
            )
        ),
    ]
    assert found.by_torch and found.numbers == 4 * (64 + 4) + 4 * 3 * 4 * (64 + 48)
    rewrite(adapter, lambda tensors: tensors.pop(f"{PREFIX}.0.block_sparse_moe.experts.3.w2.lora_A.weight"))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2\.lora_A\.weight is missing"):
        inspect_adapter(adapter, inspect(mixtral).config)


def test_modules_that_there_are_not_any_more_are_not_missed(mixtral, tmp_path):
    """Experts and routers are named as modules, but have none since version 5 of transformers."""
    adapter = write_adapter(tmp_path / "adapter", mixtral, targets=("q_proj",))
    config = inspect(mixtral).config
    before = inspect_adapter(adapter, config)
    change(adapter, target_modules=["q_proj", "gate", "w1", "w2", "w3"])
    assert inspect_adapter(adapter, config) == before and not before.by_torch


@pytest.mark.parametrize(
    ("parameters", "modules"),
    [
        (("experts.gate_up_proj", "experts.down_proj"), {"gate_up": f"{EXPERTS}.base_layer", "down": EXPERTS}),
        (("experts.gate_up_proj",), {"gate_up": EXPERTS}),
        (("mlp.experts.down_proj", "mlp.gate.weight"), {"router": "gate", "down": EXPERTS}),
    ],
)
def test_experts_that_are_parameters_of_one_module(mixtral, tmp_path, parameters, modules):
    """What adapts the second is around what adapts the first; patterns know them by the parameters' names."""
    written = tuple(name.removeprefix("mlp.") for name in parameters)
    pattern = {r".*\.gate_up_proj": 6}
    adapter = write_adapter(tmp_path / "adapter", mixtral, targets=(), parameters=written, rank_pattern=pattern)
    found = inspect_adapter(change(adapter, target_parameters=list(parameters)), inspect(mixtral).config)
    stacks = [f"{stack}.{expert}" for stack in ("gate_up", "down") if stack in modules for expert in range(4)]
    assert [part.stack for part in found.parts] == stacks + ["router"] * ("router" in modules)
    sizes = {"gate_up": (96, 6, 64), "down": (64, 4, 48), "router": (4, 4, 64)}
    for part in found.parts:
        stack = part.stack.split(".")[0]
        columns, rank, inputs = sizes[stack]
        assert (part.columns, part.rank, part.numbers) == (columns, rank, rank * (columns + inputs))
        if stack != "router":
            assert part.down.name == f"{modules[stack]}.lora_A.weight"
            assert part.up.shape == (columns, 4 * rank)


def test_parameters_in_another_order_are_refused(mixtral, tmp_path):
    parameters = ("experts.gate_up_proj", "experts.down_proj")
    adapter = write_adapter(tmp_path / "adapter", mixtral, targets=(), parameters=parameters)

    def work(tensors):
        for which in "AB":
            names = [f"{EXPERTS}{inner}.lora_{which}.weight" for inner in ("", ".base_layer")]
            tensors.update(zip(names, [tensors[name] for name in reversed(names)], strict=True))

    with pytest.raises(CheckpointError, match=r"has shape \[16, 48\], the configurations make it \[16, 64\]"):
        inspect_adapter(rewrite(adapter, work), inspect(mixtral).config)
    change(adapter, target_parameters=["experts.down_proj"])
    with pytest.raises(CheckpointError, match=r"base_layer.*neither target_parameters nor target_modules names"):
        inspect_adapter(rewrite(adapter, work), inspect(mixtral).config)


def test_a_rank_has_the_experts_of_its_group_and_its_part_of_each(mixtral, tmp_path):
    parameters = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
    whole = inspect(mixtral)
    found = inspect_adapter(
        write_adapter(tmp_path / "adapter", mixtral, targets=(), parameters=parameters), whole.config
    )
    parts = adapter_of_rank(found, whole, Rank(3, 4, 2)).parts
    assert [part.stack for part in parts] == ["gate_up.2", "gate_up.3", "down.2", "down.3", "router"]
    assert parts[0].cut == TensorCut(0, (range(24, 48), range(72, 96))) and parts[0].columns == 48
    assert parts[2].cut == TensorCut(1, (range(24, 48),)) and parts[2].columns == 64
    assert parts[4].cut is None and parts[4].columns == 4


def test_matrices_that_cannot_be_adapted_are_named(tmp_path):
    target, right = "kv_b_proj", "latent keys and values"
    extra = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0}
    groups = {"n_group": 1, "topk_group": 1}
    tiny = TinyModel("DeepseekV3ForCausalLM", layers=1, extra=extra | experts | groups)
    model = write_checkpoint(tmp_path / "model", tiny)
    adapter = write_adapter(tmp_path / "adapter", model, targets=("q_proj",))
    change(adapter, target_modules=["q_proj", target])
    with pytest.raises(CheckpointError, match=rf"target_modules names model\.layers\.0\..*{target}: .*{right}"):
        inspect_adapter(adapter, inspect(model).config)


def test_the_fingerprint_is_of_what_is_added(adapter, config, tmp_path):
    """Neither the place nor what the configuration says besides counts; every number and every scale does."""
    before = inspect_adapter(adapter, config).fingerprint
    copy = shutil.copytree(adapter, tmp_path / "copy")
    assert (
        inspect_adapter(change(copy, base_model_name_or_path="elsewhere", revision="x"), config).fingerprint == before
    )
    assert inspect_adapter(change(copy, target_modules="all-linear"), config).fingerprint == before
    assert inspect_adapter(change(copy, lora_alpha=9), config).fingerprint != before
    change(copy, lora_alpha=8)
    assert inspect_adapter(copy, config).fingerprint == before

    def work(tensors):
        tensors[f"{PREFIX}.1.mlp.down_proj.lora_B.weight"][3, 2] += 1

    assert inspect_adapter(rewrite(copy, work), config).fingerprint != before
