"""The same model from its headers, its index and its config.json; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import CheckpointError
from penstock.checkpoint.files import read_object
from penstock.sizing import Described, describe
from penstock.sizing.forms import BITS_16, FLOAT32, NumberForm
from penstock.testing.checkpoints import TinyModel, write_checkpoint

KIMI = Path(__file__).parent / "published" / "kimi-k2.5" / "config.json"
INDEX = "model.safetensors.index.json"
INT4 = NumberForm(4, (1, 32), 2)


def written(tmp_path: Path, values: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def kimi(tmp_path: Path, **text: Any) -> Path:
    """A small Kimi K2.5: two layers of four experts."""
    values = read_object(KIMI)
    small = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}
    small |= {"moe_intermediate_size": 64, "intermediate_size": 96, "q_lora_rank": 32, "kv_lora_rank": 32}
    values["text_config"] |= {**small, **text}
    return written(tmp_path, values)


def indexed(directory: Path, names: list[str], total: int | None) -> Path:
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def names_of(model: Described) -> list[str]:
    """As they stand in an index."""
    found = []
    for name, form in model.forms.items():
        ends = ("_packed", "_scale", "_shape") if form.quantised else ("",)
        found += [f"language_model.{name}{end}" for end in ends]
    return [*found, "vision_tower.patch_embed.proj.weight"]


def test_a_config_alone_says_what_the_files_say(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", TinyModel(shards=2))
    by_headers = describe(directory)
    assert by_headers.by == "headers" and set(by_headers.forms.values()) == {FLOAT32}
    for file in directory.glob("*.safetensors"):
        file.unlink()
    by_index = describe(directory)
    (directory / INDEX).unlink()
    values = read_object(directory / "config.json")
    by_config = describe(written(directory, {**values, "dtype": "float32"}))
    assert (by_index.by, by_config.by) == ("index", "config")
    assert by_headers.stored_bytes == by_config.stored_bytes
    assert by_headers.forms == by_config.forms
    assert by_index.config == by_headers.config == by_config.config
    assert describe(directory / "config.json") == by_config


def test_one_missing_file_is_as_if_there_were_none(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", TinyModel(shards=2))
    next(directory.glob("*.safetensors")).unlink()
    assert describe(directory).by == "index"


def test_only_routed_experts_of_kimi_are_in_int4(tmp_path: Path) -> None:
    model = describe(kimi(tmp_path))
    packed = {name for name, form in model.forms.items() if form == INT4}
    assert packed == {
        f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(4)
        for part in ("gate", "up", "down")
    }
    assert model.forms["model.layers.1.mlp.gate.e_score_correction_bias"] == FLOAT32


def test_an_index_says_the_same_and_the_bytes_of_pictures(tmp_path: Path) -> None:
    by_config = describe(kimi(tmp_path))
    total = by_config.stored_bytes + 1234
    by_index = describe(indexed(tmp_path, names_of(by_config), total))
    assert by_index.by == "index" and by_index.forms == by_config.forms
    assert by_index.stored_bytes == total
    assert by_index.picture_bytes == by_config.picture_bytes + 1234  # all that is not the decoder's
    without = describe(indexed(tmp_path, names_of(by_config), None))
    assert without.picture_bytes == by_config.picture_bytes and without.stored_bytes == by_config.stored_bytes


def test_an_index_counts_more_than_lists_of_what_is_not_quantised(tmp_path: Path) -> None:
    names = names_of(describe(kimi(tmp_path)))
    odd = "language_model.model.layers.1.mlp.experts.0.down_proj.weight"
    names = [name for name in names if not name.startswith(odd)] + [odd]
    model = describe(indexed(tmp_path, names, None))
    assert model.forms[odd.removeprefix("language_model.")] == BITS_16
    assert model.forms["model.layers.1.mlp.experts.1.down_proj.weight"] == INT4


def float8(tmp_path: Path, **settings: Any) -> Described:
    values = {**read_object(KIMI)["text_config"], "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2}
    values |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1}
    values["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], **settings}
    return describe(written(tmp_path, values))


def test_all_matrices_of_layers_are_in_float8_but_for_routers(tmp_path: Path) -> None:
    model = float8(tmp_path)
    plain = {name for name, form in model.forms.items() if form == BITS_16 and "norm" not in name}
    assert plain == {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"}
    assert model.forms["model.layers.0.mlp.down_proj.weight"] == NumberForm(8, (128, 128), 4)


def test_what_is_not_to_convert_is_not_in_float8(tmp_path: Path) -> None:
    model = float8(tmp_path, modules_to_not_convert=["self_attn.kv_b_proj", "layers.0.mlp"])
    assert model.forms["model.layers.1.self_attn.kv_b_proj.weight"] == BITS_16
    assert model.forms["model.layers.0.mlp.down_proj.weight"] == BITS_16
    assert model.forms["model.layers.1.mlp.shared_experts.down_proj.weight"].quantised


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names, not 'lm_head'"),
        ({"ignore": ["re:("]}, "ignore has 're:(', no regular expression"),
        ({"ignore": [3]}, "ignore must be a list of names, not [3]"),
    ],
)
def test_lists_that_cannot_be_are_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        float8(tmp_path, **settings)
    assert says in error.value.reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"n_routed_experts": 2**30},
            "describes 1073741824 experts in each layer: num_hidden_layers 2 times that must",
        ),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, not 0"),
        ({"dtype": "float64"}, "dtype 'float64' is not supported, only float32, bfloat16, float16"),
    ],
)
def test_configs_that_cannot_be_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    directory = kimi(tmp_path, **change)
    if "dtype" in change:
        written(tmp_path, {**read_object(tmp_path / "config.json"), **change})
    with pytest.raises(CheckpointError) as error:
        describe(directory)
    assert says in error.value.reason and error.value.file == directory / "config.json"


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": "b"}}, "tensor model.embed_tokens.weight of KimiK25ForConditionalGeneration is missing"),
        ({"weight_map": {"a": "b"}, "metadata": {"total_size": -1}}, "total_size must be the bytes of all tensors"),
    ],
)
def test_indexes_that_cannot_be_are_refused(index: dict[str, Any], says: str, tmp_path: Path) -> None:
    directory = kimi(tmp_path)
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        describe(directory)
    assert says in error.value.reason and error.value.file == directory / INDEX


@pytest.mark.parametrize(
    ("vision", "says"),
    [
        ([], "vision_config must be an object, not []"),
        ({"merge_kernel_size": 2}, "merge_kernel_size must be two positive integers, not 2"),
        ({"vt_hidden_size": -1}, "hidden_size must be a positive integer, not -1"),
    ],
)
def test_parts_for_pictures_that_cannot_be_are_refused(vision: Any, says: str, tmp_path: Path) -> None:
    directory = kimi(tmp_path)
    written(directory, {**read_object(directory / "config.json"), "vision_config": vision})
    with pytest.raises(CheckpointError) as error:
        describe(directory)
    assert says in error.value.reason
