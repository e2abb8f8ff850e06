"""What ranks hold and read, beside slices that are counted one number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.checkpoint import EMBEDDING, ModelConfig
from penstock.checkpoint.model_config import parse_config, text_values
from penstock.checkpoint.tensors import HEAD, needed_tensors
from penstock.runtime.config import ConfigError
from penstock.sizing import Described, DeviceKind, PlannedSplit, Workload, size
from penstock.sizing.forms import BITS_16, FLOAT32, NumberForm
from penstock.sizing.ranks import activation_peak, alive_tokens, misfit, rank_form, stage_ranks
from penstock.sizing.rates import chosen_share, decode_rate, weights_read
from penstock.sizing.slabs import Slab, parameters, slabs_of

FILE = Path("config.json")
INT4 = NumberForm(4, (1, 8), 2)
BASE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "tied": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 40, "hidden_activation": "gelu_pytorch_tanh"},
    "fused": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
    },
}


def model(name: str, **more: object) -> ModelConfig:
    values = {**BASE, **MODELS[name], **more}
    return parse_config(FILE, text_values(FILE, values))


def forms_of(config: ModelConfig, *, packed: bool = False) -> dict[str, NumberForm]:
    """16 bits; `packed`: routed experts in int4."""
    return {
        name: INT4 if packed and ".experts." in name else FLOAT32 if name.endswith("correction_bias") else BITS_16
        for name in needed_tensors(config)
    }


def shared(index: int, units: int, ranks: int, rank: int) -> bool:
    """Whether a rank has unit `index` of so many. Fewer units than ranks are on several."""
    if units < ranks:
        return index == rank * units // ranks
    each = -(-units // ranks)
    return rank * each <= index < (rank + 1) * each


def rows_and_columns(config: ModelConfig, name: str, shape: tuple[int, ...], ranks: int, rank: int) -> tuple[int, int]:
    """Rows and columns of a matrix that one of `ranks` has, counted by asking for each."""
    heads, kept, dim = config.n_heads, config.n_kv_heads, config.head_dim
    rows, columns = shape if len(shape) == 2 else (1, shape[0])

    def mine(extent: int, units: int) -> int:
        return sum(shared(number * units // extent, units, ranks, rank) for number in range(extent))

    if name in (EMBEDDING, HEAD):
        return mine(rows, rows), columns
    if "qkv_proj" in name:
        return mine(heads * dim, heads) + 2 * mine(kept * dim, kept), columns
    if any(part in name for part in ("q_proj", "q_b_proj", "kv_b_proj")):
        return (1, mine(columns, heads)) if len(shape) == 1 else (mine(rows, heads), columns)
    if "k_proj" in name or "v_proj" in name:
        return (1, mine(columns, kept)) if len(shape) == 1 else (mine(rows, kept), columns)
    if "o_proj" in name:
        return rows, mine(columns, heads)
    if "gate_up_proj" in name:
        return mine(rows, rows // 2), columns
    if any(part in name for part in ("gate_proj", "up_proj", ".w1.", ".w3.")):
        return mine(rows, rows), columns
    if "down_proj" in name or ".w2." in name:
        return rows, mine(columns, columns)
    return rows, columns


def experts_in(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Of a tensor of routed experts: each one's number and its matrix as [out, in]."""
    parts = name.split(".experts.")
    if len(parts) == 1:
        return
    if len(shape) == 3:
        yield from ((expert, (shape[2], shape[1])) for expert in range(shape[0]))
    else:
        yield int(parts[1].split(".")[0]), shape


def naive_bytes(
    config: ModelConfig, forms: dict[str, NumberForm], split: PlannedSplit, layers: range, rank: int
) -> int:
    """Bytes of weights of one rank of the stage with these layers."""
    total, needed = 0, dict(needed_tensors(config))
    sizes = dict(forms)
    if config.tied:
        needed[HEAD], sizes[HEAD] = needed[EMBEDDING], forms[EMBEDDING]
    for name, shape in needed.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if name == EMBEDDING else config.n_layers - 1
        if layer not in layers:
            continue
        form = FLOAT32 if config.norm_offset and name.endswith("norm.weight") else sizes[name]
        experts = list(experts_in(config, name, shape))
        for expert, matrix in experts:
            if shared(expert, config.experts.count, split.expert, rank // split.expert_parts):
                part = rows_and_columns(config, name, matrix, split.expert_parts, rank % split.expert_parts)
                total += form.nbytes(*part)
        if not experts:
            total += form.nbytes(*rows_and_columns(config, name, shape, split.tensor, rank % split.tensor))
    return total


SPLITS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 3, 1), (2, 1, 2), (1, 1, 4), (4, 2, 2), (2, 1, 4)]


DENSE = ("llama", "qwen2", "tied", "fused")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [(name, numbers) for name in MODELS for numbers in SPLITS if name not in DENSE or numbers[2] == 1],
    ids=str,
)
def test_ranks_hold_their_slices(name: str, numbers: tuple[int, int, int]) -> None:
    config, split = model(name), PlannedSplit(*numbers)
    forms = forms_of(config, packed=name == "deepseek" and split.expert_parts < 8)
    slabs = slabs_of(config, forms, "auto")
    assert misfit(config, slabs, split) is None
    known = Described(FILE, config, forms, None, 1000, 0, "config")
    for number, rank in enumerate(stage_ranks(known, slabs, split, DEVICES, WORK)):
        pictures = 0 if number else 1000
        own = [naive_bytes(config, forms, split, rank.layers, each) for each in range(split.group)]
        assert rank.weights == max(own) + pictures
        assert rank.pictures == pictures


DEVICES = DeviceKind(gpus=1, gpu_memory=1 << 30, bandwidth=10**9, reserve=0, host_gpus=8, sync_us=0)
WORK = Workload(context=64, streams=4, batch_tokens=32)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_tensors(name: str) -> None:
    config = model(name)
    count = 0
    for shape in needed_tensors(config).values():
        product = 1
        for extent in shape:
            product *= extent
        count += product
    assert parameters(config, slabs_of(config, forms_of(config), "auto"))[0] == count


def test_heads_are_divided_and_repeated_and_latent_planes_are_whole() -> None:
    kept, latent = model("llama").kv, model("deepseek").kv
    assert [rank_form(kept, PlannedSplit(ranks)).heads for ranks in (1, 2, 4, 8)] == [2, 1, 1, 1]
    assert [rank_form(latent, PlannedSplit(ranks)).width for ranks in (1, 8)] == [32, 32]


def test_windows_and_chunks_bound_what_is_alive() -> None:
    chunked, sliding = model("llama4", num_hidden_layers=8), model("tied")
    assert alive_tokens(chunked, range(8), 100) == 6 * 16 + 2 * 100
    assert alive_tokens(chunked, range(8), 10) == 80
    assert alive_tokens(sliding, range(3), 100) == 40 + 100 + 40


def test_a_step_reads_what_its_tokens_use() -> None:
    config = model("mixtral")
    slabs = slabs_of(config, forms_of(config), "auto")
    layers = range(3)
    experts = 3 * 4 * 3 * 32 * 48 * 2
    others = sum(slab.nbytes for slab in slabs if slab.layer >= 0) - experts
    row = 32 * 2
    assert weights_read(config, slabs, PlannedSplit(), layers, 1) == others + experts // 2 + row  # 2 of 4 experts
    assert chosen_share(4, 2, 2) == 0.75  # one half, and a half of the other half
    assert weights_read(config, slabs, PlannedSplit(), layers, 2) == others + experts * 3 // 4 + 2 * row
    assert weights_read(config, slabs, PlannedSplit(1, 1, 4), layers, 1) == others + experts // 8 + row // 4


def rate(config: ModelConfig, split: PlannedSplit, streams: int, **more: float) -> float:
    """Seconds from token to token."""
    slabs = slabs_of(config, forms_of(config), "auto")
    devices = DeviceKind(
        **{"gpus": 1, "gpu_memory": 1 << 30, "bandwidth": 10**9, "reserve": 0, "host_gpus": 8, "sync_us": 0, **more}
    )
    ranks = stage_ranks(Described(FILE, config, forms_of(config), None, 0, 0, "config"), slabs, split, devices, WORK)
    found = decode_rate(config, slabs, split, ranks, streams=streams, devices=devices, work=WORK)
    assert found.tokens_per_s == streams / found.step_s
    return found.step_s


def test_a_step_takes_as_long_as_reading_and_waiting() -> None:
    config = model("llama")
    slabs = slabs_of(config, forms_of(config), "auto")
    weights = sum(slab.nbytes for slab in slabs if slab.layer >= 0)
    row, context = 32 * 2, 64 * 3 * 2 * 2 * 4 * 2  # tokens, layers, planes, heads, width, bytes
    assert rate(config, PlannedSplit(), 4) == pytest.approx((weights + 4 * (row + context)) / 1e9)
    waited = rate(config, PlannedSplit(2), 4, sync_us=1000) - rate(config, PlannedSplit(2), 4)
    assert waited == pytest.approx(0.006)  # two for each of three layers
    waited = rate(config, PlannedSplit(1, 3), 1, sync_us=1000) - rate(config, PlannedSplit(1, 3), 1)
    assert waited == pytest.approx(0.002)  # to the second and to the third stage


def test_stages_work_on_different_batches_at_a_time() -> None:
    config = model("llama", num_hidden_layers=4, vocab_size=2)
    alone, staged = rate(config, PlannedSplit(), 1), rate(config, PlannedSplit(1, 2), 1)
    assert staged == pytest.approx(alone)  # one stream goes through both
    assert rate(config, PlannedSplit(1, 2), 2) == pytest.approx(alone, rel=0.02)  # and two at a time as fast as one


@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        ("llama", (3, 1, 1), "tp 3 must divide the 8 attention heads"),
        ("llama", (1, 4, 1), "pp 4 must not be more than the 3 layers"),
        ("llama", (1, 1, 2), "ep 2 must be 1: the model has no experts"),
        ("deepseek", (1, 1, 3), "ep 3 must divide the 8 experts"),
        ("deepseek", (8, 1, 1), "tp / ep 8 leaves 4 of 32 numbers to a rank, and scales are for 8 each"),
    ],
)
def test_what_cannot_be_divided_is_said(name: str, split: tuple[int, int, int], says: str) -> None:
    config = model(name)
    slabs = slabs_of(config, forms_of(config, packed=True), "auto")
    assert misfit(config, slabs, PlannedSplit(*split)) == says


def test_kv_heads_and_inner_sizes_must_be_divided_evenly() -> None:
    config = model("llama", num_attention_heads=12, num_key_value_heads=4, head_dim=4)
    slabs = slabs_of(config, forms_of(config), "auto")
    says = misfit(config, slabs, PlannedSplit(6))
    assert says == "tp 6 must divide the 4 KV heads, or be a multiple of them"
    config = model("llama", intermediate_size=44)
    slabs = slabs_of(config, forms_of(config), "auto")
    assert misfit(config, slabs, PlannedSplit(8)) == "tp 8 must divide the 44 numbers inside a dense block"


def test_other_types_take_what_their_numbers_take() -> None:
    config = model("llama")
    forms = forms_of(config)

    def total(dtype: str) -> int:
        return sum(slab.nbytes for slab in slabs_of(config, forms, dtype))

    numbers = sum(slab.numbers for slab in slabs_of(config, forms, "auto"))
    assert total("auto") == total("bfloat16") == 2 * numbers and total("float32") == 4 * numbers
    rows = 3 * (32 + 8 + 8 + 32 + 48 + 48 + 32) + 100
    precise = 100 * 32 + 7 * 32  # the embedding and the norms
    assert total("int8") == numbers - precise + 4 * rows + 2 * precise


def test_the_activation_peak_of_a_hand() -> None:
    config = model("llama")
    demand = Workload(context=64, streams=4, batch_tokens=32)
    stream = 2 * 32 * 32 * 2
    block = 32 * (3 * 48 + 32) * 2
    assert activation_peak(config, PlannedSplit(), demand, last=False) == stream + block
    many = Workload(context=64, streams=64, batch_tokens=32)
    assert activation_peak(config, PlannedSplit(), many, last=True) == stream + 64 * 100 * 6


def sized(name: str, **more: object) -> Described:
    config = model(name, **more)
    return Described(FILE, config, forms_of(config), None, 0, 0, "config")


def fleet(gpus: int, memory: int, **more: float) -> DeviceKind:
    return DeviceKind(
        **{
            "gpus": gpus,
            "gpu_memory": memory,
            "bandwidth": 10**9,
            "reserve": 0,
            "host_gpus": 8,
            "sync_us": 10.0,
            **more,
        }
    )


def test_the_best_way_holds_the_streams_and_is_then_the_fastest() -> None:
    found = size(sized("llama"), fleet(4, 1 << 30), WORK)
    assert found.ways[0].workers == 4 and found.ways[0].fits  # for so small a model waiting costs more than reading
    found = size(sized("llama"), fleet(4, 1 << 30, sync_us=0), Workload(context=64, streams=1, batch_tokens=32))
    assert found.ways[0].split == PlannedSplit(4)  # and if waiting costs nothing, four read faster than one
    tight = size(sized("llama"), fleet(4, 30_000), WORK)
    assert tight.ways[0].held == max(way.held for way in tight.ways) < tight.ways[0].wanted
    assert all(one.held >= other.held for one, other in zip(tight.ways, tight.ways[1:], strict=False))


def test_layers_are_divided_within_a_host_unless_one_asks() -> None:
    config = {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 64}
    found = size(sized("llama", **config), fleet(16, 1 << 30), WORK)
    assert {way.split.tensor for way in found.ways} == {1, 2, 4, 8}
    asked = size(sized("llama", **config), fleet(16, 1 << 30), WORK, tensor=16)
    assert [way.split for way in asked.ways] == [PlannedSplit(16)]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tensor": 3}, "gpus = 4: cannot be divided by tp 3"),
        ({"tensor": 2, "pipeline": 3, "expert": 1}, "gpus = 4: must be a multiple of the 6 ranks of tp 2, pp 3, ep 1"),
        ({"tensor": 2, "expert": 3, "pipeline": 1}, "ep = 3: must be a multiple or a divisor of tp, 2"),
        ({"expert": 4}, "ep 4 must be 1: the model has no experts"),
    ],
)
def test_splits_that_cannot_be_are_refused(asked: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        size(sized("llama"), fleet(4, 1 << 30), WORK, **asked)
    assert says in str(error.value)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context = 513: must be at most 512, the model's own limit"):
        size(sized("llama"), fleet(1, 1 << 30), Workload(context=513, streams=1, batch_tokens=32))


def test_forms_round_up() -> None:
    assert INT4.nbytes(3, 9) == 14 + 3 * 2 * 2  # 27 halves of a byte, and two scales for each row
    assert NumberForm(8, (128, 128), 4).nbytes(129, 128) == 129 * 128 + 8
    assert Slab(0, 2, 8, INT4, count=5).nbytes == 5 * (8 + 4)
