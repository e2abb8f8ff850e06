"""A model cut into parts: every number is in the part that the reference says, and is read from its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint import Rank, TensorInfo, check_expert_groups, check_split, inspect, part_of
from penstock.checkpoint.split import heads_of_rank, share
from penstock.engine.models.loading import all_stacks
from penstock.testing.checkpoints import TinyModel, write_checkpoint

FILE = Path("file")


@st.composite
def cuts(draw):
    """A stored tensor of float32, and up to three cuts of it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cut, now = [], list(shape)
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, now[axis] - 1))
        stop = draw(st.integers(start + 1, now[axis]))
        cut.append((axis, range(start, stop)))
        now[axis] = stop - start
    return tuple(shape), cut


def read(info, content, some=None):
    return np.frombuffer(b"".join(content[at : at + size] for at, size in info.ranges(some)), np.float32)


@given(cuts())
def test_ranges_of_parts_are_their_numbers(case):
    shape, cut = case
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    content, info = b"before!!" + whole.tobytes(), TensorInfo(FILE, "t", "F32", shape, 8)
    for axis, some in cut:
        info = info.cut(axis, some)
        whole = whole.take(range(some.start, some.stop), axis)
    assert info.shape == whole.shape and info.nbytes == whole.nbytes
    assert read(info, content).tolist() == whole.flatten().tolist()
    rows = range(whole.shape[0] // 2, whole.shape[0])
    assert read(info, content, rows).tolist() == whole[rows.start :].flatten().tolist()
    assert sum(size for _, size in info.ranges()) == info.nbytes
    if not info.steps:
        assert len(list(info.ranges())) == 1


@given(st.integers(0, 400), st.integers(1, 9))
def test_shares_are_even_and_leave_nothing_out(total, ranks):
    parts = [share(total, ranks, rank) for rank in range(ranks)]
    assert [number for part in parts for number in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 16
    if total % (16 * ranks) == 0:
        assert not any(size % 16 for size in sizes)


@pytest.mark.parametrize(("heads", "ranks"), [(8, 2), (4, 4), (2, 4), (1, 8)])
def test_ranks_have_heads_of_their_own_or_the_same(heads, ranks):
    parts = [heads_of_rank(heads, ranks, rank) for rank in range(ranks)]
    assert all(len(part) == max(1, heads // ranks) for part in parts)
    assert sorted({head for part in parts for head in part}) == list(range(heads))
    for queries in (heads * ranks, 3 * heads * ranks):  # a rank's queries look at its own heads
        own = heads_of_rank(queries, ranks, 1)
        assert {query * heads // queries for query in own} == set(parts[1])


MODELS = {
    "llama": TinyModel(),
    "tied, biased": TinyModel(architecture="Qwen2ForCausalLM", tied=True),
    "fused": TinyModel(architecture="Phi3ForCausalLM", vocab_size=260),
    "experts": TinyModel(architecture="MixtralForCausalLM", extra={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama 4": TinyModel(
        architecture="Llama4ForCausalLM", layers=4, extra={"intermediate_size_mlp": 96, "num_local_experts": 4}
    ),
}


def matrix_bytes(checkpoint):
    """Of the layers' matrices that a process reads."""
    return sum(part.nbytes for stack in all_stacks(checkpoint) if stack.name != "head" for part in stack.parts)


@pytest.mark.parametrize(
    ("name", "ranks", "groups"),
    [(name, ranks, 1) for name in MODELS for ranks in (2, 4)]
    + [(name, ranks, 2) for name in ("experts", "llama 4") for ranks in (2, 4)],
)
def test_each_rank_reads_its_part_of_the_layers(tmp_path, name, ranks, groups):
    """All but the embedding, of which rows are read when they are needed, norms, routers and KV heads that several
    have."""
    checkpoint = inspect(write_checkpoint(tmp_path / "model", MODELS[name]))
    parts = [part_of(checkpoint, Rank(rank, ranks, groups), "f") for rank in range(ranks)]
    names = {name for part in parts for name in part.part.pieces}
    own, total = [matrix_bytes(part) for part in parts], matrix_bytes(checkpoint)
    again = max(1, ranks // checkpoint.config.n_kv_heads)
    assert max(own) < 1.1 * total / ranks * (1 if again == 1 else 1.4)
    left = {name for name in checkpoint.tensors if name not in names}
    assert all(
        len(checkpoint.tensors[name].shape) == 1 or "embed" in name or "gate.w" in name or "router" in name
        for name in left
    )


def test_scales_of_parts_are_those_of_their_numbers():
    scale = TensorInfo(FILE, "s", "F32", (3, 4), 0)
    info = TensorInfo(FILE, "t", "F8_E4M3", (10, 13), 48, scale, (4, 4))
    found = info.cut(0, range(5, 10)).cut(1, range(6, 13))
    assert found.scale.shape == (2, 3) and found.phase == (1, 2)
    assert found.scale.offset == (1 * 4 + 1) * 4
    again = found.cut(0, range(3, 5))
    assert again.scale.shape == (1, 3) and again.phase == (0, 2)


def test_columns_of_four_bits_go_in_pairs():
    info = TensorInfo(FILE, "t", "I4", (4, 16), 100)
    assert list(info.cut(1, range(4, 8)).ranges()) == [(102, 2), (110, 2), (118, 2), (126, 2)]
    with pytest.raises(AssertionError, match="half a byte"):
        info.cut(1, range(1, 3))


@pytest.mark.parametrize(
    ("fields", "ranks", "reason"),
    [({}, 3, "must divide the 4 attention heads"), ({"heads": 6, "kv_heads": 3}, 2, "must divide the 3 KV heads")],
)
def test_what_cannot_be_cut_is_refused(tmp_path, fields, ranks, reason):
    config = inspect(write_checkpoint(tmp_path / "model", TinyModel(**fields))).config
    with pytest.raises(ValueError, match=reason):
        check_split(config, ranks)


@pytest.mark.parametrize(
    ("name", "groups", "reason"),
    [("llama", 2, "must be 1: the model has no experts"), ("experts", 3, "must divide the 4 ranks and the 4 experts")],
)
def test_experts_that_cannot_be_divided_are_refused(tmp_path, name, groups, reason):
    config = inspect(write_checkpoint(tmp_path / "model", MODELS[name])).config
    with pytest.raises(ValueError, match=reason):
        check_expert_groups(config, Rank(0, 4, groups))


def test_groups_have_whole_experts_and_their_ranks_divide_each(tmp_path):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", MODELS["experts"]))
    parts = [part_of(checkpoint, Rank(rank, 4, 2), "f").config.experts for rank in range(4)]
    assert [[own.number for own in part.own(0)] for part in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [part.intermediate_size for part in parts] == [checkpoint.config.experts.intermediate_size // 2] * 4


def test_groups_take_turns_at_experts_that_several_have(tmp_path):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", MODELS["experts"]))
    layers = len(checkpoint.config.experts.layers)
    copies = (((3,), (0,)), *[((), ())] * (layers - 1))
    parts = [part_of(checkpoint, Rank(rank, 2, 2, copies=copies), "f") for rank in range(2)]
    first, second = [part.config.experts.own(0) for part in parts]
    assert first == ((0, 0, 2), (1, 0, 1), (3, 0, 2))
    assert second == ((0, 1, 2), (2, 0, 1), (3, 1, 2))
    assert [own.number for own in parts[0].config.experts.own(layers - 1)] == [0, 1]
    held = [{name for name in part.part.pieces if "layers.0." in name and ".experts." in name} for part in parts]
    assert len(held[0]) == len(held[1]) == 3 * 3
    assert len(held[0] & held[1]) == 2 * 3
