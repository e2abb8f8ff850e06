"""Published models, from their config.json alone: sizes that are computed here by hand, and figures that are public."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import pytest

from penstock.checkpoint.files import read_object
from penstock.checkpoint.reading import Reader
from penstock.sizing import Described, DeviceKind, Sized, Workload, describe, size
from penstock.sizing.pictures import picture_numbers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

PUBLISHED = Path(__file__).parent / "published"
GIB = 1 << 30
H100, H200 = 80 * GIB, 141 * 10**9


@cache
def described(model: str) -> Described:
    return describe(PUBLISHED / model)


def gpus(count: int, memory: int, bandwidth: int = 3_350 * 10**9) -> DeviceKind:
    return DeviceKind(gpus=count, gpu_memory=memory, bandwidth=bandwidth, reserve=GIB, host_gpus=8, sync_us=10)


def work(context: int, **more: object) -> Workload:
    return Workload(**{"context": context, "streams": 1, "batch_tokens": 512, **more})


def way(model: str, devices: DeviceKind, demand: Workload, *split: int) -> Sized:
    tensor, pipeline, expert = split
    found = size(described(model), devices, demand, tensor=tensor, pipeline=pipeline, expert=expert)
    assert len(found.ways) == 1
    return found.ways[0]


HIDDEN, EXPERTS = 7168, 384
EXPERT = 3 * 2048 * HIDDEN  # gate, up and down
INT4 = EXPERT // 2 + EXPERT // 32 * 2  # half a byte each, and a bfloat16 for each 32
ASKED = 1536 * HIDDEN + 1536  # what queries are made of, and its norm
KEPT = 576 * HIDDEN + 512  # what is kept, and the norm of its first 512
BY_HEADS = 64 * 192 * 1536 + 64 * 256 * 512 + HIDDEN * 64 * 128  # queries, keys and values, what they are mixed to
ROUTER = EXPERTS * HIDDEN
LAYER = ASKED + KEPT + BY_HEADS + 2 * HIDDEN
VOCABULARY = 163840 * HIDDEN


def test_kimi_takes_what_a_hand_finds() -> None:
    model = described("kimi-k2.5")
    dense = 3 * 18432 * HIDDEN
    others = 61 * LAYER + dense + 60 * (ROUTER + EXPERT) + 2 * VOCABULARY + HIDDEN  # the shared expert is like the rest
    pictures = 471_143_920 * 2
    corrections = 60 * EXPERTS * 4
    shapes = 60 * EXPERTS * 3 * 16
    assert model.picture_bytes == pictures
    assert model.stored_bytes == 60 * EXPERTS * INT4 + 2 * others + corrections + pictures + shapes
    assert 594e9 < model.stored_bytes < 596e9  # its files are said to have 595 GB
    found = size(model, gpus(8, H100), work(4096))
    assert found.parameters == 60 * EXPERTS * EXPERT + others + 60 * EXPERTS
    assert 1.0e12 < found.parameters < 1.05e12  # a trillion parameters ...
    assert 31e9 < found.used + VOCABULARY < 33e9  # ... of which a token uses 32 billion, the embedding included
    assert found.kv_token == 61 * (512 + 64) * 2 == 70_272


def test_kimi_on_eight_ranks_takes_what_a_hand_finds() -> None:
    found = way("kimi-k2.5", gpus(8, H100), work(4096), 8, 1, 1)
    (rank,) = found.ranks
    dense = 3 * 18432 * HIDDEN
    whole = 61 * (ASKED + KEPT + 2 * HIDDEN) + 60 * ROUTER + HIDDEN
    divided = 61 * BY_HEADS + dense + 60 * EXPERT + 2 * VOCABULARY
    experts = 60 * EXPERTS * INT4 // 8
    assert rank.experts == experts
    assert rank.weights == experts + 2 * (whole + divided // 8) + 60 * EXPERTS * 4 + rank.pictures
    assert rank.kv_token == 70_272  # the same plane on each
    assert rank.room == H100 - GIB - rank.activations - rank.weights
    assert found.kv_tokens == rank.room // 70_272


@pytest.mark.parametrize(
    ("memory", "split", "least", "most"),
    [
        (80 * GIB, (8, 1, 1), 52, 53),  # as the card's name says, in GiB
        (81_559 << 20, (8, 1, 1), 49, 50),  # what nvidia-smi shows of an H100
        (80 * 10**9, (8, 1, 1), 8, 9),  # if 80 GB were decimal: this does not leave 30 GiB
        (80 * 10**9, (4, 2, 1), 14, 15),
    ],
)
def test_what_kimi_leaves_for_kv_on_eight_h100(memory: int, split: tuple[int, int, int], least: int, most: int) -> None:
    found = way("kimi-k2.5", gpus(8, memory), work(131_072), *split)
    assert least * GIB < sum(rank.room for rank in found.ranks) * found.split.group < most * GIB


def test_kimi_with_replicated_attention_does_not_fit_where_divided_attention_does() -> None:
    divided = way("kimi-k2.5", gpus(8, H100), work(4096), 8, 1, 8)
    replicated = way("kimi-k2.5", gpus(8, H100), work(4096), 1, 1, 8)
    assert (
        replicated.ranks[0].weights - divided.ranks[0].weights
        == 2 * 7 * (61 * BY_HEADS + 3 * 18432 * HIDDEN + 60 * EXPERT + 2 * VOCABULARY) // 8
    )
    assert divided.kv_tokens and not replicated.kv_tokens
    roomy = way("kimi-k2.5", gpus(8, H200), work(4096), 1, 1, 8)
    assert roomy.kv_tokens == 8 * roomy.ranks[0].kv_tokens  # each replica has sequences of its own


def test_scout_takes_what_a_hand_finds() -> None:
    hidden, inner = 5120, 8192
    attention = 2 * hidden * hidden + 2 * hidden * 1024
    expert = 3 * hidden * inner
    layer = attention + 17 * expert + 16 * hidden + 2 * hidden  # sixteen and the shared one, the router, two norms
    numbers = 48 * layer + 2 * 202048 * hidden + hidden
    model = described("llama-4-scout/config.json")
    found = size(model, gpus(2, H200), work(16_384))
    assert found.parameters == numbers
    assert model.stored_bytes == 2 * numbers + model.picture_bytes
    assert 108e9 < model.stored_bytes / 2 < 109.5e9  # 109 billion parameters, pictures included
    assert 17e9 < found.used + 202048 * hidden < 17.5e9  # of which a token uses 17 billion, the embedding included
    assert found.kv_token == 48 * 2 * 8 * 128 * 2
    assert found.kv_stream == 16_384 * found.kv_token
    assert found.kv_alive == (12 * 16_384 + 36 * 8_192) * 4096  # 36 layers look at their chunk alone


def test_scout_leaves_more_than_56_gib_for_kv_on_two_h200() -> None:
    found = way("llama-4-scout", gpus(2, H200), work(131_072), 2, 1, 1)
    (rank,) = found.ranks
    assert 2 * rank.room > 56 * GIB
    assert rank.kv_token == 48 * 2 * 4 * 128 * 2  # half of the heads
    shown = way("llama-4-scout", gpus(2, 143_771 << 20), work(131_072), 2, 1, 1)  # by nvidia-smi
    assert 2 * shown.ranks[0].room > 74 * GIB


def numbers_of_transformers(name: str, vision: dict[str, object], text: dict[str, object]) -> int:
    """Parameters of a model on no device, without those of its text part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text)
        with torch.device("meta"):
            model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    parts = ("vision", "mm_projector", "multi_modal_projector")
    return sum(
        weight.numel() for key, weight in model.named_parameters() if key.removeprefix("model.").startswith(parts)
    )


SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 1000, "pad_token_id": 0}
KIMI_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "patch_size": "patch_size",
}


@pytest.mark.parametrize(
    ("name", "model", "text"),
    [
        ("Kimi_K25", "kimi-k2.5", {**SMALL, "hidden_size": 7168, "n_routed_experts": 8, "moe_intermediate_size": 8}),
        ("Llama4", "llama-4-scout", {**SMALL, "hidden_size": 5120, "num_local_experts": 2}),
    ],
)
def test_parts_for_pictures_have_the_parameters_of_transformers(name: str, model: str, text: dict[str, object]) -> None:
    values = read_object(PUBLISHED / model / "config.json")
    vision = values["vision_config"]
    if name == "Kimi_K25":
        vision = {KIMI_NAMES[key]: value for key, value in vision.items() if key in KIMI_NAMES}
    read = Reader(Path("config.json"), values)
    known = numbers_of_transformers(name, vision, text)
    assert picture_numbers(read, values["architectures"][0], int(str(text["hidden_size"]))) == known


def test_gemmas_part_for_pictures_has_the_parameters_of_transformers() -> None:
    vision = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision |= {"image_size": 56, "patch_size": 14, "vision_use_head": False}
    known = numbers_of_transformers("Gemma3", vision, {**SMALL, "num_attention_heads": 4, "head_dim": 16})
    read = Reader(Path("config.json"), {"vision_config": vision})
    assert picture_numbers(read, "Gemma3ForConditionalGeneration", 64) == known


@pytest.mark.parametrize(
    ("memory", "wanted"), [(H100, (4, 2)), (H200, (8, 1))], ids=["whole contexts need stages", "one stage is quickest"]
)
def test_what_is_recommended_for_kimi(memory: int, wanted: tuple[int, int]) -> None:
    found = size(described("kimi-k2.5"), gpus(8, memory), work(131_072))
    best = found.ways[0]
    assert best.fits and (best.split.tensor, best.split.pipeline) == wanted
    assert all(way.held < best.held or way.tokens_per_s <= best.tokens_per_s for way in found.ways)
