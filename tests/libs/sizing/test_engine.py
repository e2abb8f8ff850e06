"""What is planned is what an engine takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint import EMBEDDING, Rank, inspect, part_of
from penstock.checkpoint.files import read_object
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward.runner import Runner
from penstock.models import embedded
from penstock.runtime.config import ConfigError
from penstock.sizing import DeviceKind, PlannedSplit, Sized, Workload, describe, size
from penstock.sizing.slabs import slabs_of
from penstock.testing.checkpoints import TinyModel, write_checkpoint

DEVICE = DeviceKind(gpu_memory=1 << 30, bandwidth=10**9, reserve=0, host_gpus=8, sync_us=0)
FAMILIES = {
    "llama": TinyModel(),
    "tied": TinyModel(tied=True),
    "mixtral": TinyModel("MixtralForCausalLM", extra={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": TinyModel("Gemma2ForCausalLM", tied=True, extra={"sliding_window": 32}),
    "deepseek": TinyModel(
        "DeepseekV3ForCausalLM",
        extra={
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": TinyModel(
        "Llama4ForCausalLM",
        layers=4,
        extra={"intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 32},
    ),
}


def planned(directory: Path, dtype: str, kv_dtype: str) -> Sized:
    model = describe(directory)
    demand = Workload(context=model.config.max_positions, streams=1, batch_tokens=512, dtype=dtype, kv_dtype=kv_dtype)
    return size(model, DEVICE, demand).ways[0]


def tensors(value: object) -> Iterator[Tensor]:
    """All that a structure of weights holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def held(runner: Runner) -> int:
    """Bytes of the weights that torch computes with."""
    weights = runner.decoder._weights
    table = weights.embedding._table
    assert isinstance(table, Tensor)
    return sum(tensor.nbytes for tensor in tensors(weights)) + table.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_holds_what_torch_does(name: str, dtype: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / name, FAMILIES[name])
    runner = Runner(inspect(directory), EngineConfig(model=directory, dtype=dtype, kernels=False, kv_pool_tokens=64))
    (rank,) = planned(directory, dtype, dtype).ranks
    assert rank.weights == held(runner)
    assert rank.kv_token * runner.memory.block_size == runner.memory.block_bytes


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_hold_what_a_split_gives_them(name: str, ranks: int, tmp_path: Path) -> None:
    """But for the embedding, which a split worker leaves whole in its file."""
    directory = write_checkpoint(tmp_path / name, replace(FAMILIES[name], vocab_size=320))
    checkpoint, model = inspect(directory), describe(directory)
    split = PlannedSplit(tensor=ranks)
    slabs = [slab for slab in slabs_of(model.config, model.forms, "float32") if slab.layer >= 0]
    part = part_of(checkpoint, Rank(ranks - 1, ranks), "").part
    assert part is not None
    whole = [info for tensor, info in checkpoint.tensors.items() if tensor not in (*part.pieces, EMBEDDING)]
    cut = [info for pieces in part.pieces.values() for info in pieces]
    assert sum(slab.held(split) for slab in slabs) == sum(info.nbytes for info in (*whole, *cut))


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_copies_of_experts_take_what_is_planned(name: str, copies: int, tmp_path: Path) -> None:
    """Of two groups, in each layer that has experts; no more than what a group has not anyway, and none in stages."""
    directory = write_checkpoint(tmp_path / name, replace(FAMILIES[name], vocab_size=320))
    checkpoint, model = inspect(directory), describe(directory)
    experts = checkpoint.config.experts
    assert experts is not None

    def taken(copied: int) -> int:
        theirs = tuple(range(experts.count // 2, experts.count // 2 + copied))
        extra = tuple((theirs, ()) if sparse else ((), ()) for sparse in experts.layers)
        part = part_of(checkpoint, Rank(0, 2, 2, None, extra), "").part
        assert part is not None
        return sum(info.nbytes for pieces in part.pieces.values() for info in pieces)

    def sized(asked: int, pipeline: int) -> int:
        devices = replace(DEVICE, gpus=2 * pipeline)
        work = Workload(context=64, streams=1, batch_tokens=64, dtype="float32", redundant_experts=asked)
        ranks = size(model, devices, work, tensor=2, expert=2, pipeline=pipeline).ways[0].ranks
        return sum(rank.experts for rank in ranks)

    assert sized(copies, 1) - sized(0, 1) == taken(copies) - taken(0) > 0
    assert sized(experts.count, 1) == sized(experts.count // 2, 1)
    assert sized(copies, 2) - sized(0, 2) == sized(copies, 1) - sized(0, 1), "whatever the stages are"


def test_a_model_without_experts_has_no_copies(tmp_path: Path) -> None:
    model = describe(write_checkpoint(tmp_path / "llama", FAMILIES["llama"]))
    with pytest.raises(ConfigError, match="redundant_experts = 1: must be 0: the model has no experts"):
        size(model, DEVICE, Workload(context=64, streams=1, batch_tokens=64, redundant_experts=1))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
async def test_the_embedded_model_takes_what_is_planned(kv_dtype: str) -> None:
    directory = embedded("penstock-mini")
    config = EngineConfig(model=directory, dtype="bfloat16", weights="plain", kv_dtype=kv_dtype, kv_pool_tokens=1024)
    (rank,) = planned(directory, "bfloat16", kv_dtype).ranks
    async with Engine.open(config) as engine:
        assert rank.kv_token * config.block_size == engine.spec.block_bytes
        model = engine.checkpoint.config
        norms = (2 * model.n_layers + 1) * model.hidden_size * 2
        table = model.vocab_size * model.hidden_size * 2  # stays in its file
        assert rank.weights == engine.stats().weights_bytes + norms + table


@pytest.mark.parametrize("dtype", ["int8", "int4"])
async def test_fewer_bits_take_what_is_planned(dtype: str) -> None:
    directory = embedded("penstock-mini")
    (rank,) = planned(directory, dtype, "bfloat16").ranks
    async with Engine.open(EngineConfig(model=directory, dtype=dtype, kv_pool_tokens=1024)) as engine:
        model = engine.checkpoint.config
        others = (2 * model.n_layers + 1 + model.vocab_size) * model.hidden_size * 2
        assert rank.weights == engine.stats().weights_bytes + others


def written_int4(directory: Path, group: int, *, plain: str = "none", scales: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint with experts in int4, but for those matrices whose names have `plain`."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    tiny = TinyModel("MixtralForCausalLM", hidden_size=64, intermediate_size=96, extra=experts)
    write_checkpoint(directory, tiny)
    stored = load_file(directory / "model.safetensors")
    for name in [name for name in stored if ".experts." in name and plain not in name]:
        rows, columns = stored.pop(name).shape
        stored[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        stored[f"{name}_scale"] = torch.ones(rows, -(-columns // group), dtype=scales)
        stored[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(stored, directory / "model.safetensors")
    values = read_object(directory / "config.json")
    groups = {"all": {"weights": {"num_bits": 4, "group_size": group}}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (directory / "config.json").write_text(json.dumps({**values, "quantization_config": how}))
    return directory


@pytest.mark.parametrize("group", [32, 64])
def test_int4_checkpoints_take_what_is_planned(tmp_path: Path, group: int) -> None:
    """On a CPU the experts take 4.5 bits, whatever the groups on disk; where they are unpacked, as much as bfloat16."""
    directory = written_int4(tmp_path / "model", group)
    checkpoint = inspect(directory)
    runner = Runner(checkpoint, EngineConfig(model=directory, dtype="int4", kv_pool_tokens=64))
    assert runner.packed is not None
    model = checkpoint.config
    taken = sum(packed.data.nbytes for name, packed in runner.packed.matrices.items() if packed.kind == "int4")
    assert taken == planned(directory, "int4", "bfloat16").ranks[0].experts
    assert model.experts is not None
    whole = model.n_layers * model.experts.count * 3 * model.hidden_size * model.experts.intermediate_size
    assert taken == whole * 9 // 16
    assert planned(directory, "bfloat16", "bfloat16").ranks[0].experts == 2 * whole


def test_a_matrix_in_int4_of_parts_is_unpacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of the two that make `gate_up` of expert 1 is plain."""
    caplog.set_level("INFO")
    directory = written_int4(tmp_path / "model", 32, plain=".experts.1.w3")
    runner = Runner(inspect(directory), EngineConfig(model=directory, dtype="int4", kv_pool_tokens=64))
    assert runner.packed is not None
    experts = {name: packed for name, packed in runner.packed.matrices.items() if name.count(".") == 2}
    unpacked = {name for name, packed in experts.items() if packed.kind == "bfloat16"}
    layers = len(runner.decoder.layers)
    assert unpacked == {f"{layer}.gate_up.1" for layer in range(layers)}
    assert f"{7 * layers} of {10 * layers + 1} matrices stay in int4, the others in bfloat16" in caplog.text
    taken = sum(packed.data.nbytes for packed in experts.values())
    assert taken == planned(directory, "int4", "bfloat16").ranks[0].experts


@pytest.mark.parametrize(("group", "scales"), [(16, torch.bfloat16), (32, torch.float16), (32, torch.float32)])
def test_int4_that_an_engine_does_not_keep_is_not_planned(tmp_path: Path, group: int, scales: torch.dtype) -> None:
    directory = written_int4(tmp_path / "model", group, scales=scales)
    with pytest.raises(
        ConfigError, match=r"dtype = 'int4': keeps groups of 32 numbers .*: use int8 or bfloat16"
    ) as own:
        settled(EngineConfig(model=directory, dtype="int4"), inspect(directory))
    with pytest.raises(ConfigError) as found:
        planned(directory, "int4", "bfloat16")
    assert str(found.value) == str(own.value)
    if group == 16:
        (directory / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match="keeps groups of 32 numbers"):
            planned(directory, "int4", "bfloat16")


def test_quantised_checkpoints_are_unpacked(tmp_path: Path) -> None:
    """In float8 on disk, and as large as bfloat16 in memory."""
    directory = write_checkpoint(tmp_path / "model", FAMILIES["deepseek"])
    stored = load_file(directory / "model.safetensors")
    for name in [name for name in stored if ".experts." in name]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(stored, directory / "model.safetensors")
    values = read_object(directory / "config.json")
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps({**values, "quantization_config": settings}))
    config = EngineConfig(model=directory, dtype="bfloat16", kernels=False, kv_pool_tokens=64)
    taken = held(Runner(inspect(directory), config))
    assert taken == planned(directory, "bfloat16", "bfloat16").ranks[0].weights
    assert taken != planned(directory, "auto", "bfloat16").ranks[0].weights
