"""A sound directory is understood; a wrong or damaged one is refused with the file and the reason, at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint import SUPPORTED, CheckpointError, fingerprint, inspect, tokenizer_fingerprint
from penstock.testing.checkpoints import END_OF_TURN, EOS, TinyModel, write_checkpoint

SMALL = TinyModel(layers=1, hidden_size=32, intermediate_size=32, heads=2, kv_heads=1)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def model(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "model", SMALL)


def edit(file: Path, **changes) -> None:
    """Sets keys of a JSON file; `...` removes a key."""
    values = json.loads(file.read_text())
    for key, value in changes.items():
        if value is ...:
            values.pop(key, None)
        else:
            values[key] = value
    file.write_text(json.dumps(values))


def refusal(directory: Path) -> CheckpointError:
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        inspect(directory)
    assert time.perf_counter() - started < 1
    assert str(caught.value.file) in str(caught.value)
    return caught.value


def test_a_sound_directory(model):
    found = inspect(model)
    assert found.config.architecture == "LlamaForCausalLM"
    assert (found.config.n_heads, found.config.n_kv_heads, found.config.head_dim) == (2, 1, 16)
    assert found.eos_token_ids == {EOS, END_OF_TURN} and found.bos_token_id == 256
    assert found.weight_files == (model / "model.safetensors",)
    assert found.tokenizer == model / "tokenizer.json"
    assert found.chat_template == model / "chat_template.jinja"
    assert found.parameters == 2 * 320 * 32 + 32 * (2 + 1 + 1 + 2) * 16 + 3 * 32 * 32 + 3 * 32


def test_code_in_the_directory_is_not_run(model, tmp_path):
    """What Hugging Face's `auto_map` names is Python of whoever made the model."""
    ran = tmp_path / "ran"
    (model / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    (model / "__init__.py").write_text("from . import modeling_own")
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit(model / "config.json", auto_map=names, trust_remote_code=True)
    settings_file = model / "tokenizer_config.json"
    edit(settings_file, auto_map={"AutoTokenizer": ["modeling_own.Tokenizer", None]})
    program = (
        "import asyncio, sys; from pathlib import Path; from penstock.chat.model import load_chat_model\n"
        "from penstock.engine.config import EngineConfig; from penstock.engine.engine import Engine\n"
        "async def main():\n"
        "    async with Engine.open(EngineConfig(Path(sys.argv[1]), threads=1)): pass\n"
        "load_chat_model(Path(sys.argv[1])); asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", program, str(model)], check=True, cwd=model)
    assert not ran.exists()


def test_optional_files(model):
    (model / "generation_config.json").unlink()
    (model / "chat_template.jinja").unlink()
    found = inspect(model)
    assert found.eos_token_ids == {EOS} and found.chat_template is None
    edit(model / "tokenizer_config.json", chat_template="{{ messages }}")
    assert inspect(model).chat_template == model / "tokenizer_config.json"
    (model / "tokenizer_config.json").unlink()
    assert inspect(model).chat_template is None


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_architectures(tmp_path, name):
    for tied in (False, True):
        directory = write_checkpoint(tmp_path / f"{tied}", TinyModel(name, tied=tied, shards=2, extra=EXPERTS))
        assert inspect(directory).config.tied == tied
        assert len(inspect(directory).weight_files) == 2
        edit(directory / "config.json", tie_word_embeddings=True)
        assert inspect(directory).config.tied == tied, "a head in the file counts"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are Llama"),
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, r"model\.layers\.1"),
        ({"num_hidden_layers": 9_999}, "12 tensors; what config.json describes has 9999 or more"),
        ({"num_hidden_layers": 3_000_000}, "num_hidden_layers must be at most 10000, not 3000000"),
        ({"num_hidden_layers": 2_000_000_000}, "num_hidden_layers must be at most"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"intermediate_size": 64}, "shape"),
        ({"attention_bias": True}, "bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope"),
        ({"rope_parameters": {"rope_theta": -5.0}}, "rope_theta"),
        ({"eos_token_id": 320}, None),
        ({"bos_token_id": 320}, "bos_token_id"),
        ({"bos_token_id": [[1]]}, "bos_token_id"),
    ],
)
def test_config_that_cannot_be_served(model, changes, reason):
    edit(model / "config.json", **changes)
    if reason is None:  # generation_config.json has the last word
        inspect(model)
        (model / "generation_config.json").unlink()
        reason = "eos_token_id"
    with pytest.raises(CheckpointError, match=reason):
        inspect(model)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_millions_of_experts_are_refused_at_once(tmp_path, name):
    directory = write_checkpoint(tmp_path / "model", TinyModel(name, extra=EXPERTS))
    edit(directory / "config.json", num_experts=2_000_000_000, num_local_experts=2_000_000_000)
    assert "or more" in str(refusal(directory))


def test_sliding_windows(tmp_path):
    def written(architecture, **extra):
        directory = write_checkpoint(tmp_path / "model", TinyModel(architecture, extra=EXPERTS))
        edit(directory / "config.json", **extra)
        return directory

    def windows(architecture, **extra):
        return inspect(written(architecture, **extra)).config.windows

    assert windows("LlamaForCausalLM", sliding_window=512) == (None,) * 3, "the family has none"
    assert windows("MistralForCausalLM", sliding_window=None) == (None,) * 3
    assert windows("MistralForCausalLM", sliding_window=512) == (512,) * 3
    assert windows("MistralForCausalLM", sliding_window=...) == (4096,) * 3, "what it means by saying nothing"
    used = {"sliding_window": 512, "use_sliding_window": True}
    assert windows("Qwen2ForCausalLM", sliding_window=512) == (None,) * 3
    assert windows("Qwen2ForCausalLM", **used) == (None,) * 3, "28 layers come first"
    assert windows("Qwen2ForCausalLM", **used, max_window_layers=2) == (None, None, 512)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert windows("Qwen3ForCausalLM", **used, layer_types=types) == (None, 512, None)
    assert windows("Qwen3MoeForCausalLM", **used) == (512,) * 3
    assert windows("Gemma2ForCausalLM", sliding_window=512) == (512, None, 512)
    assert windows("Gemma3ForCausalLM", sliding_window=512, sliding_window_pattern=3) == (512, 512, None)
    assert "sliding_window" in str(refusal(written("Qwen3ForCausalLM", sliding_window=512, layer_types=types)))
    assert "sliding_window" in str(refusal(written("MistralForCausalLM", sliding_window=0)))
    assert "linear_attention" in str(refusal(written("Qwen3ForCausalLM", layer_types=["linear_attention"] * 3)))
    assert "num_hidden_layers 3" in str(refusal(written("Qwen3ForCausalLM", layer_types=["full_attention"])))
    assert "layer_types" in str(refusal(written("MistralForCausalLM", sliding_window=512, layer_types=types)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files(model, name):
    (model / name).unlink()
    assert name in str(refusal(model))


def test_not_a_directory(tmp_path):
    assert "not a directory" in str(refusal(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json(model, name, content):
    (model / "chat_template.jinja").unlink()
    (model / name).write_bytes(content)
    assert refusal(model).file == model / name


@pytest.mark.parametrize(
    "vocabulary",
    [{"model": {}}, {"model": {"vocab": {"a": "b"}}}, {"model": 3}, {"model": {"vocab": {"a": 320}}}],
)
def test_tokenizers_that_do_not_fit(model, vocabulary):
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert refusal(model).file == model / "tokenizer.json"


# Weights


def damage_header(file: Path, change) -> None:
    """Rewrites a safetensors header with the same data behind it."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    packed = json.dumps(header).encode()
    file.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + length :])


def change_entry(**fields):
    return lambda header: header["model.norm.weight"].update(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: header.pop("model.norm.weight"), "."),
        (change_entry(dtype="I8"), "I8"),
        (change_entry(dtype=["F32"]), "malformed|F32"),
        (change_entry(shape=[16]), "declares"),
        (change_entry(shape=[16, 2]), "shape"),
        (change_entry(shape=None), "malformed"),
        (change_entry(shape=[-1, -32]), "malformed"),
        (change_entry(shape=[True, 32]), "malformed"),
        (change_entry(shape=[1] * 300_000), "malformed"),
        (change_entry(shape=[1 << 63, 32]), "malformed"),
        (change_entry(data_offsets=[0, 128]), "starts at byte|expected"),
        (change_entry(data_offsets=[0]), "malformed"),
        (lambda header: header.update(spare=header.pop("model.norm.weight")), "missing"),
        (lambda header: header.update(broken=7), "malformed"),
    ],
)
def test_damaged_headers(model, change, reason):
    damage_header(model / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=reason):
        inspect(model)


def test_unknown_tensor_is_refused_by_name(tmp_path):
    import numpy
    from safetensors.numpy import load_file, save_file

    model = write_checkpoint(tmp_path / "model", SMALL)
    tensors = load_file(model / "model.safetensors")
    for name, accepted in [("model.layers.0.self_attn.rotary_emb.inv_freq", True), ("model.extra", False)]:
        save_file({**tensors, name: numpy.zeros(2, numpy.float32)}, model / "model.safetensors")
        if accepted:
            inspect(model)
        else:
            assert "model.extra" in str(refusal(model))


@pytest.mark.parametrize("keep", [0, 4, 7, 8, 9, 500, -1000, -1])
def test_truncated_weights(model, keep):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refusal(model).file == file


def test_trailing_bytes(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"1234")
    assert "no tensor declares" in str(refusal(model))


@settings(max_examples=150)
@given(at=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_changed_header_byte_is_harmless_or_refused(tmp_path_factory, at, value):
    """Nothing but CheckpointError comes out, whatever byte of the header changed."""
    directory = tmp_path_factory.mktemp("flip") / "model"
    write_checkpoint(directory, SMALL)
    file = directory / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[at] = value
    file.write_bytes(raw)
    try:
        inspect(directory)
    except CheckpointError as error:
        assert error.reason


def test_shards(tmp_path):
    directory = write_checkpoint(tmp_path / "model", TinyModel(shards=3))
    index = directory / "model.safetensors.index.json"
    shards = inspect(directory).weight_files
    for weights in ({}, {"a": "../x.safetensors"}, {"a": 5}, {"a": []}, {"a": ""}, {"a": "x\0"}, {"a": "\ud800"}, []):
        saved = index.read_text()
        edit(index, weight_map=weights)
        assert refusal(directory).file == index
        index.write_text(saved)
    shards[1].unlink()
    assert refusal(directory).file == shards[1]
    shards[1].write_bytes(shards[0].read_bytes())
    assert "repeats" in str(refusal(directory))


# Fingerprints


@pytest.mark.parametrize(
    ("tiny", "known"),
    [
        (TinyModel(), "d8ffc5e727fe83ba5703df21e6cad8f35d21de8e98d77643f15e0d1673e943d5"),
        (
            TinyModel("MixtralForCausalLM", extra={"num_local_experts": 4, "num_experts_per_tok": 2}),
            "d6becc8cf2c446cd497415936d7bc47ec1f057406528fdd688f84d3c6be2d438",
        ),
        (
            TinyModel("Gemma2ForCausalLM", extra={"sliding_window": 24}),
            "78bcea7b01d017b05dbdbbc73f6f670ec13fa5eb135b989af1991e9167798d64",
        ),
        (
            TinyModel("Qwen3ForCausalLM", extra={"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
            "e0cfdcb2ade921f0fa639172199b663dd2557a790ccee708aa56b514ac07b4ad",
        ),
    ],
)
def test_fingerprints_are_those_of_earlier_versions(tmp_path, tiny, known):
    """Else an upgrade would find nothing of what is kept. A field that is new has to be in `_LATER`."""
    assert fingerprint(write_checkpoint(tmp_path / "model", tiny)) == known


def test_fingerprint_follows_what_is_computed(tmp_path):
    one = write_checkpoint(tmp_path / "one", SMALL)
    other = write_checkpoint(tmp_path / "other", SMALL)
    assert fingerprint(one) == fingerprint(other) == fingerprint(inspect(one)) and len(fingerprint(one)) == 64
    edit(other / "config.json", transformers_version="9", rope_theta=10000)
    assert fingerprint(one) == fingerprint(other)
    edit(other / "config.json", rope_theta=20000.0)
    assert fingerprint(one) != fingerprint(other)
    edit(other / "config.json", rope_theta=10000.0)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    assert fingerprint(one) != fingerprint(other)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(inspect(other))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_fingerprint(other)


def test_no_torch(model):
    script = (
        "import sys; from penstock.checkpoint import inspect, fingerprint;"
        f"inspect({str(model)!r}); fingerprint({str(model)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
