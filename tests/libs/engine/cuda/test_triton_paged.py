"""The Triton kernels: what they compute, by triton's interpreter on a CPU, and that they compile for GPUs.

Triton is no requirement: without it these are skipped. The interpreter has no products of bfloat16, so float16 stands
for the 16-bit types.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from tests.libs.engine.cuda.paged_problem import Problem

if torch.cuda.is_available():
    pytest.skip("a GPU runs the kernels themselves, see tests/gpu", allow_module_level=True)
if "triton" in sys.modules:
    pytest.skip("triton was imported already, and not to be interpreted", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from penstock.engine.kernels.cuda import triton_paged
from penstock.engine.kernels.cuda.paged import host_paged, on_device
from penstock.engine.kernels.cuda.triton_paged import TritonPaged

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


def test_a_small_workspace_takes_several_calls(monkeypatch):
    problem = Problem([2, 1, 4, 1], [300, 17, 30, 260], windows=(None,))
    whole = TritonPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)(0, problem.query)
    monkeypatch.setattr(triton_paged, "_WORKSPACE", 2 * 4 * 16 * 4)
    step = TritonPaged(problem.shape, problem.memory).begin(problem.paged, problem.host, False)
    assert len(step._slices) == 3
    assert torch.equal(step(0, problem.query), whole)
