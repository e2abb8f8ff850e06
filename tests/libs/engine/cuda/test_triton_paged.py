"""The Triton kernels: what they compute, by triton's interpreter on a CPU, and that they compile for GPUs.

Triton is no requirement: without it these are skipped. The interpreter has no products of bfloat16, so float16 stands
for the 16-bit types.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.libs.engine.cuda.paged_problem import Problem

if torch.cuda.is_available():
    pytest.skip("a GPU runs the kernels themselves, see tests/gpu", allow_module_level=True)
if "triton" in sys.modules:
    pytest.skip("triton was imported already, and not to be interpreted", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from triton.runtime import interpreter

from penstock.engine.kernels.cuda import triton_paged
from penstock.engine.kernels.cuda.paged import GatherPaged, HostPaged, Paged, host_paged, on_device
from penstock.engine.kernels.cuda.triton_paged import TritonPaged


@pytest.fixture(autouse=True)
def rows_alike(monkeypatch):
    """Multiplies row by row, as a GPU's products do: to numpy's BLAS it matters where in a matrix a row stands."""

    def matmul(rows, matrix, dtype):
        return np.stack([np.matmul(row, matrix, dtype=dtype) for row in rows])

    monkeypatch.setattr(interpreter, "np", SimpleNamespace(**{**vars(np), "matmul": matmul}))


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: log of 0


@pytest.mark.parametrize(
    ("problem", "tolerance"),
    [
        (Problem([1, 1, 1], [5, 300, 17]), 1e-5),
        (Problem([1, 5, 3], [5, 530, 17], heads=6, kv_heads=2, dim=24, block=5, windows=(None, 40, 300)), 1e-5),
        (Problem([4, 1], [9, 20], heads=8, kv_heads=8, softcap=5.0), 1e-5),
        (Problem([2, 1], [40, 300], heads=8, dim=64, dtype=torch.float16), 4e-3),
        (Problem([1, 3], [40, 30], dim=160, dtype=torch.float16), 4e-3),
    ],
)
def test_the_kernel_is_right(problem, tolerance):
    assert problem.worst(TritonPaged(problem.shape, problem.memory)) < tolerance


def test_a_row_does_not_depend_on_what_is_beside_it():
    """Not in one bit: beside a long context it is merged from parts, and alone it is not."""
    together = Problem([3, 1, 1], [40, 300, 17], windows=(None,))
    answers = TritonPaged(together.shape, together.memory).begin(together.paged, together.host, False)(
        0, together.query
    )
    host = host_paged([40], [3], together.tables[:1], 3)
    paged = on_device(host, torch.device("cpu"))
    answer = TritonPaged(together.shape, together.memory).begin(paged, host, False)(0, together.query[:3])
    assert torch.equal(answer, answers[:3])


def alone(problem, sequence, layer):
    """What the sequence's rows are when nothing is beside them."""
    table, end, rows = problem.tables[sequence], problem.ends[sequence], problem.rows[sequence]
    host = host_paged([end], [rows], [table], len(table))
    paged = on_device(host, problem.device)
    first = sum(problem.rows[:sequence])
    step = TritonPaged(problem.shape, problem.memory).begin(paged, host, False)
    return step(layer, problem.query[first : first + rows])


SMALL = 32
"""Tokens of a chunk where a test has many of them."""
FAN = Problem(
    [1, 1, 2, 1, 1, 1, 3, 1],
    [90, 74, 67, 98, 65, 5, 76, 70],
    heads=6,
    dim=24,
    windows=(None, 40),
    block=8,
    shares=((1, 0, 8), (2, 0, 8), (3, 1, 9), (4, 0, 99), (6, 3, 9)),
)
"""Six sequences share two chunks, and some of them a part of the third; two share nothing."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sequences_that_share_pages_are_right_and_as_each_alone(monkeypatch, dtype):
    monkeypatch.setattr(triton_paged, "CHUNK", SMALL)
    problem = replace(FAN, dtype=dtype)
    backend = TritonPaged(problem.shape, problem.memory)
    assert problem.worst(backend) < (1e-5 if dtype == torch.float32 else 4e-3)
    step = backend.begin(problem.paged, problem.host, False)
    together = step(1, problem.query).split(problem.rows)
    assert all(torch.equal(alone(problem, at, 1), own) for at, own in enumerate(together))


def test_shared_chunks_are_read_once(monkeypatch):
    """For all nine rows of six sequences, of which a product takes five."""
    monkeypatch.setattr(triton_paged, "CHUNK", SMALL)
    step = TritonPaged(FAN.shape, FAN.memory).begin(FAN.paged, FAN.host, False)
    ((_, _, items),) = step._work.launches
    chunks = items.view(-1, 3)[:, 0].tolist()
    assert [chunks.count(number) for number in range(4)] == [2 + 2, 2 + 1, 6 + 1, 1]


@st.composite
def sharing(draw):
    """Contexts of some small chunks, some of which begin like one before them."""
    pairs = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 110)), min_size=2, max_size=4))
    shares = tuple(
        (at, draw(st.integers(0, at - 1)), draw(st.integers(1, 40)))
        for at in range(1, len(pairs))
        if draw(st.integers(0, 3))
    )
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (1, 5), (1, 8)]))
    return Problem(
        [rows for rows, _ in pairs],
        [max(rows, end) for rows, end in pairs],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        block=draw(st.sampled_from([3, 8, 16, 48])),
        windows=(draw(st.sampled_from([None, None, 7, 40, 70])),),
        softcap=draw(st.sampled_from([None, 5.0])),
        seed=draw(st.integers(0, 99)),
        shares=shares,
    )


@settings(max_examples=10)
@given(sharing())
def test_whoever_shares_what(problem):
    """Right as gathering is, and bit for bit what each sequence is alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_paged, "CHUNK", SMALL)
        together = TritonPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)(
            0, problem.query
        )
        gathered = GatherPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)(
            0, problem.query
        )
        torch.testing.assert_close(together, gathered, atol=1e-5, rtol=1e-5)
        for at, own in enumerate(together.split(problem.rows)):
            assert torch.equal(alone(problem, at, 0), own)


def test_a_captured_step_follows_its_pages(monkeypatch):
    """Sequences come to share pages, grow, and go, in tensors that keep their places; its programs stay as many."""
    monkeypatch.setattr(triton_paged, "CHUNK", SMALL)
    apart = Problem([2, 2, 2], [60, 100, 90], windows=(None,))
    like = Problem([2, 2, 2], [61, 140, 90], windows=(None,), shares=((1, 0, 3), (2, 1, 4)))
    other = Problem([2, 2, 2], [110, 2, 112], windows=(None,), shares=((2, 0, 6),))
    longer = replace(other, ends=[112, 3, 112])
    memory = SimpleNamespace(data=torch.zeros(40, *apart.memory.data.shape[1:]), block_size=16)
    ends, tables = np.zeros(3, dtype=np.int32), np.zeros((3, 12), dtype=np.int32)
    host = HostPaged(apart.host.starts, ends, tables)
    moved = Paged(apart.paged.starts, torch.from_numpy(ends), torch.from_numpy(tables), 6, 2, 12 * 16)
    step = None
    for problem in (apart, like, other, longer, apart):
        memory.data[: len(problem.memory.data)] = problem.memory.data
        ends[:] = problem.ends
        tables[:, : problem.host.tables.shape[1]] = problem.host.tables
        if step is None:
            step = TritonPaged(problem.shape, memory).begin(moved, host, True)
            places = [each.data_ptr() for each in (step._work.rows, step._work.owners, step._work.launches[0][2])]
            room = len(step._work.launches[0][2]) // 3
            assert room == 3 * 6, "as many as if three sequences of 12 pages shared none"
        else:
            step.again(host)
        eager = TritonPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)
        assert torch.equal(step(0, problem.query), eager(0, problem.query))
        torch.testing.assert_close(step(0, problem.query), problem.right(0))
        assert places == [each.data_ptr() for each in (step._work.rows, step._work.owners, step._work.launches[0][2])]
        listed = step._work.launches[0][2].view(-1, 3)
        assert int((listed[:, 1] < listed[:, 2]).sum()) == len(eager._work.launches[0][2]) // 3


def test_a_small_workspace_takes_several_calls(monkeypatch):
    problem = Problem([2, 1, 4, 1], [300, 17, 30, 260], windows=(None,))
    whole = TritonPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)(0, problem.query)
    monkeypatch.setattr(triton_paged, "_WORKSPACE", 2 * 4 * 16 * 4)
    step = TritonPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)
    assert len(step._work.launches) == 3
    assert torch.equal(step(0, problem.query), whole)
