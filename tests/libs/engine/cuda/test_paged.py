"""Paged attention: each way of it against the naive one, with stand-ins for the libraries that need a GPU."""

from __future__ import annotations

import inspect
import logging
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.libs.engine.cuda.paged_problem import Problem

from penstock.checkpoint import inspect as look_at
from penstock.engine.kernels.cuda import over_flashinfer, varlen
from penstock.engine.kernels.cuda.choose import AttentionCandidate, candidates, choose, disproof
from penstock.engine.kernels.cuda.over_flashinfer import FlashInferPaged, flat
from penstock.engine.kernels.cuda.paged import GatherPaged, Heads, host_paged, on_device
from penstock.engine.kernels.cuda.varlen import VarlenPaged
from penstock.engine.layers.attention import naive_attend
from penstock.engine.step.memory import PageMemory
from penstock.testing.checkpoints import TinyModel, write_checkpoint

CPU = torch.device("cpu")
problems = st.builds(
    lambda members, **rest: Problem(
        [rows for rows, *_ in members],
        [max(rows, end) for rows, end, *_ in members],
        shares=tuple((at, like % at, pages) for at, (_, _, like, pages) in enumerate(members) if at and pages),
        **rest,
    ),
    members=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=5
    ),
    kv_heads=st.sampled_from([1, 2, 4]),
    block=st.sampled_from([1, 5, 16]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=20)
@given(problems)
def test_gathering_is_right(problem):
    assert problem.worst(GatherPaged(problem.shape, problem.memory)) < 1e-5


# torch's varlen attention


def documented_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """What torch says that `varlen_attn` does with a block table."""
    assert cu_seq_k is None and return_aux is None and num_splits == 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (cu_seq_q, seqused_k, block_table))
    assert int(cu_seq_q.diff().max()) <= max_q and int(seqused_k.max()) <= max_k
    left, right = window_size
    assert right == 0
    parts = []
    for at, end in enumerate(seqused_k.tolist()):
        own = query[cu_seq_q[at] : cu_seq_q[at + 1]]
        keys, values = (each[block_table[at].long()].flatten(0, 1)[:end] for each in (key, value))
        window = None if left < 0 else left + 1
        parts.append(naive_attend(own, keys, values, range(end - len(own), end), scale=scale, window=window))
    return torch.cat(parts).view(query.shape).to(query.dtype)


def test_the_stand_in_has_the_arguments_of_torch():
    attention = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(attention.varlen_attn).parameters
    if "block_table" not in real:
        pytest.skip("this torch's varlen attention does not page")
    mine = inspect.signature(documented_varlen).parameters
    assert [(name, one.kind, one.default) for name, one in real.items()] == [
        (name, one.kind, one.default) for name, one in mine.items()
    ]


@settings(max_examples=10)
@given(problems.filter(lambda problem: problem.softcap is None))
def test_varlen_is_told_what_it_needs(problem):
    assert problem.worst(VarlenPaged(problem.shape, problem.memory, documented_varlen)) < 1e-5


def test_why_varlen_is_passed_over():
    plain = Heads(4, 2, 64, 0.125, None, (None,))
    assert "float32" in (varlen.missing(plain, torch.float32, (9, 0)) or "")
    assert "compute capability 9 or 10, this device has 8.0" in (varlen.missing(plain, torch.bfloat16, (8, 0)) or "")
    capped = Heads(4, 2, 64, 0.125, 30.0, (None,))
    assert "soft cap" in (varlen.missing(capped, torch.bfloat16, (9, 0)) or "")
    if find_spec("flash_attn_interface") is None and find_spec("flash_attn") is None:
        for capability in ((9, 0), (10, 3)):
            reason = varlen.missing(plain, torch.bfloat16, capability)
            assert reason is not None and ("is not installed" in reason or " lacks " in reason)


# flashinfer


class Wrapper:
    """What flashinfer says that its wrappers do, in the layout NHD."""

    def __init__(self, workspace, layout, **options):
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self.options = options

    def _planned(self, indptr, pages, last, heads, kv_heads, dim, size, rows, window_left, logits_soft_cap, sm_scale):
        assert all(each.dtype == torch.int32 for each in (indptr, pages, last)) and len(pages) == indptr[-1]
        assert bool((last >= 1).all()) and bool((last <= size).all())
        self.plans = (indptr.tolist(), pages.long(), last.tolist(), rows.tolist())
        self.how = (size, sm_scale, None if window_left < 0 else window_left + 1, logits_soft_cap)

    def run(self, query, cache):
        indptr, pages, last, rows = self.plans
        size, scale, window, softcap = self.how
        parts = []
        for at, tokens in enumerate(last):
            own = query[rows[at] : rows[at + 1]]
            mine = pages[indptr[at] : indptr[at + 1]]
            end = (len(mine) - 1) * size + tokens
            keys, values = (each[mine].flatten(0, 1)[:end] for each in cache)
            parts.append(
                naive_attend(own, keys, values, range(end - len(own), end), scale=scale, window=window, softcap=softcap)
            )
        return torch.cat(parts).view(query.shape).to(query.dtype)


class PrefillWrapper(Wrapper):
    def plan(self, rows, indptr, pages, last, heads, kv_heads, dim, size, *, causal, q_data_type, kv_data_type, **how):
        assert causal and q_data_type == kv_data_type
        self._planned(indptr, pages, last, heads, kv_heads, dim, size, rows, **how)


class DecodeWrapper(Wrapper):
    def plan(self, indptr, pages, last, heads, kv_heads, dim, size, *, q_data_type, kv_data_type, **how):
        assert self.options["use_cuda_graph"] and q_data_type == kv_data_type
        assert len(self.options["paged_kv_last_page_len_buffer"]) == len(last)
        assert len(self.options["paged_kv_indices_buffer"]) >= len(pages)
        self._planned(indptr, pages, last, heads, kv_heads, dim, size, torch.arange(len(last) + 1), **how)


class CascadeWrapper:
    """What flashinfer says that a cascade does: a row looks at what its group has on each level; the last is causal."""

    def __init__(self, levels, workspace, layout):
        assert levels == 2 and workspace.dtype == torch.uint8 and layout == "NHD"
        self.levels = [PrefillWrapper(workspace, layout) for _ in range(levels)]
        self.looked = 0

    def plan(self, rows, indptr, pages, last, heads, kv_heads, dim, size, *, causal, window_left, **how):
        assert causal and window_left == -1
        for level, *own in zip(self.levels, rows, indptr, pages, last, strict=True):
            level.plan(*own, heads, kv_heads, dim, size, causal=True, window_left=window_left, **how)
            assert bool((own[0].diff() >= 1).all()) and bool((own[1].diff() >= 1).all()), "nothing may be empty"
        assert len(rows[0]) < len(rows[1]) and rows[0][-1] == rows[1][-1]

    def run(self, query, cache):
        (above, all_above, last_above, groups), (below, all_below, last_below, rows) = (
            level.plans for level in self.levels
        )
        size, scale, _, softcap = self.levels[1].how
        assert all(last == size for last in last_above), "whole pages are shared"
        assert len(query) == rows[-1]
        self.looked += 1
        parts = []
        for at, tokens in enumerate(last_below):
            own = query[rows[at] : rows[at + 1]]
            (group,) = (each for each in range(len(last_above)) if groups[each] <= rows[at] < groups[each + 1])
            assert rows[at + 1] <= groups[group + 1]
            mine = [*all_above[above[group] : above[group + 1]], *all_below[below[at] : below[at + 1]]]
            end = (len(mine) - 1) * size + tokens
            assert (below[at + 1] - below[at] - 1) * size + tokens >= len(own), "its rows are all below"
            keys, values = (each[torch.stack(mine)].flatten(0, 1)[:end] for each in cache)
            parts.append(naive_attend(own, keys, values, range(end - len(own), end), scale=scale, softcap=softcap))
        return torch.cat(parts).view(query.shape).to(query.dtype)


FLASHINFER = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
    BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    MultiLevelCascadeAttentionWrapper=CascadeWrapper,
)


@settings(max_examples=40)
@given(problems, st.sampled_from([1, 16, 512]))
def test_flashinfer_is_told_what_it_needs(problem, least):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_flashinfer, "LEAST_SHARED", least)
        backend = FlashInferPaged(problem.shape, problem.memory, FLASHINFER)
        assert problem.worst(backend) < 1e-5
        assert problem.worst(backend) < 1e-5, "planned again"


def test_flashinfer_computes_a_long_prefix_in_a_cascade():
    """Two families and one that is alone, in no order; in the layer without a window."""
    problem = Problem(
        [1, 2, 1, 1, 1],
        [600, 590, 700, 640, 700],
        windows=(None, 7),
        shares=((2, 0, 33), (3, 1, 34), (4, 2, 34)),
    )
    backend = FlashInferPaged(problem.shape, problem.memory, FLASHINFER)
    step = backend.begin(problem.paged, problem.host, False)
    torch.testing.assert_close(step(0, problem.query), problem.right(0))
    (above, *_), (below, _, _, rows) = (level.plans for level in step._wrappers.cascade.levels)
    assert sorted(np.diff(above)) == [33, 34] and sorted(np.diff(rows)) == [1, 1, 1, 1, 2]
    assert sum(np.diff(below)) == sum(-(-end // 16) for end in problem.ends) - 3 * 33 - 2 * 34
    torch.testing.assert_close(step(1, problem.query), problem.right(1))
    assert step._wrappers.cascade.looked == 1
    short = Problem([1, 1], [600, 600], windows=(None,), shares=((1, 0, 31),))
    backend = FlashInferPaged(short.shape, short.memory, FLASHINFER)
    step = backend.begin(short.paged, short.host, False)
    torch.testing.assert_close(step(0, short.query), short.right(0))
    assert not step._groups, "31 pages of 16 tokens are too few"


def test_steps_of_flashinfer_begin_before_others_are_computed():
    """As those of the rows of all layers and of the last one do."""
    problem, other = Problem([4, 1, 1], [20, 40, 1]), Problem([1, 1], [20, 33])
    other.memory = problem.memory
    other.tables, other.ends = problem.tables[:2], [20, 33]
    other.host = host_paged(other.ends, other.rows, other.tables, 4)
    other.paged = on_device(other.host, CPU)
    backend = FlashInferPaged(problem.shape, problem.memory, FLASHINFER)
    first = backend.begin(problem.paged, problem.host, False)
    second = backend.begin(other.paged, other.host, False)
    torch.testing.assert_close(first(0, problem.query), problem.right(0))
    torch.testing.assert_close(second(1, other.query), other.right(1))


def test_flashinfer_plans_again_before_a_replay():
    problem = Problem([1, 1, 1], [20, 40, 1])
    attend = FlashInferPaged(problem.shape, problem.memory, FLASHINFER).begin(problem.paged, problem.host, True)
    torch.testing.assert_close(attend(1, problem.query), problem.right(1))
    problem.ends[:] = [19, 33, 1]
    problem.host.ends[:] = problem.ends
    attend.again(problem.host)
    torch.testing.assert_close(attend(1, problem.query), problem.right(1))


def test_flat_tables():
    host = Problem([1, 1, 2], [5, 16, 17], block=8).host
    indptr, pages, last = flat(host, 8)
    assert indptr.tolist() == [0, 1, 3, 6] and last.tolist() == [5, 8, 1]
    assert pages.tolist() == [*host.tables[0][:1], *host.tables[1][:2], *host.tables[2][:3]]
    assert {each.dtype for each in (indptr, pages, last)} == {np.dtype(np.int32)}


def test_why_flashinfer_is_passed_over():
    plain = Heads(4, 2, 64, 0.125, None, (None,))
    assert "float32" in (over_flashinfer.missing(plain, torch.float32, (9, 0)) or "")
    odd = Heads(4, 2, 80, 0.125, None, (None,))
    assert "not of 80" in (over_flashinfer.missing(odd, torch.bfloat16, (9, 0)) or "")


# The choice


@pytest.fixture
def model(tmp_path):
    return look_at(write_checkpoint(tmp_path / "model", TinyModel())).config


def test_the_first_that_is_right_is_chosen(model, caplog):
    memory = PageMemory(model, 40, 16, torch.float32, CPU)
    heads = Heads.of(model)

    class Wrong(GatherPaged):
        name = "wrong"

        def begin(self, paged, host, fixed):
            attend = super().begin(paged, host, fixed)
            return lambda layer, query: attend(layer, query) * 1.01

    def broken():
        raise RuntimeError("no kernel image")

    undone = []
    found = [
        AttentionCandidate("absent", "it is not installed", lambda: pytest.fail("not to be made")),
        AttentionCandidate("broken", None, broken, lambda: undone.append("broken")),
        AttentionCandidate("wrong", None, lambda: Wrong(heads, memory)),
        AttentionCandidate("right", None, lambda: GatherPaged(heads, memory), lambda: pytest.fail("it is in use")),
    ]
    with caplog.at_level(logging.INFO):
        chosen = choose(model, memory, found)
    assert isinstance(chosen, GatherPaged) and not isinstance(chosen, Wrong)
    assert not memory.data.any(), "the pages are empty again"
    assert undone == ["broken"]
    said = [record.message for record in caplog.records]
    assert "absent: it is not installed" in said[0] and "no kernel image" in said[1] and "off by" in said[2]
    assert choose(model, memory, found[:3]) is None


def test_a_pool_too_small_for_a_proof_is_left_alone(model):
    memory = PageMemory(model, 3, 16, torch.float32, CPU)
    assert disproof(GatherPaged(Heads.of(model), memory), model, memory) is None


def test_a_proof_is_of_the_layers_that_are_there(model):
    """Those of one stage, which have the numbers that they have in the model."""
    memory = PageMemory(model, 50, 16, torch.float32, CPU, layers=range(1, 2))
    looked = []

    class Watched(GatherPaged):
        def begin(self, paged, host, fixed):
            attend = super().begin(paged, host, fixed)
            return lambda layer, query: looked.append(layer) or attend(layer, query)

    assert disproof(Watched(Heads.of(model), memory), model, memory) is None
    assert {*looked} == {1} and not memory.data.any()


def test_the_order_of_preference(model):
    memory = PageMemory(model, 3, 16, torch.bfloat16, CPU)
    found = candidates(Heads.of(model), memory, (9, 0))
    assert [one.name for one in found] == ["varlen", "flashinfer", "triton"]
