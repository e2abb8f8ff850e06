"""Every way of paged attention that is there, against the naive one on the CPU; and that one is chosen."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tests.libs.engine.cuda.paged_problem import Problem

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cuda.choose import candidates
from penstock.engine.kernels.cuda.graphs import CudaCapture
from penstock.engine.kernels.cuda.paged import GatherPaged, HostPaged, Paged, on_device
from penstock.testing.checkpoints import TinyModel, write_checkpoint

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def backend_of(name, problem):
    if name == "gather":
        return GatherPaged(problem.shape, problem.memory)
    found = candidates(problem.shape, problem.memory, torch.cuda.get_device_capability())
    candidate = next(one for one in found if one.name == name)
    if candidate.missing is not None:
        pytest.skip(candidate.missing)
    return candidate.make()


@pytest.mark.parametrize("name", ["gather", "varlen", "flashinfer", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "what",
    [
        {"rows": [1, 1, 1], "ends": [5, 1000, 17], "heads": 8, "kv_heads": 2, "dim": 64},
        {"rows": [5, 1, 3], "ends": [700, 40, 64], "heads": 8, "kv_heads": 8, "dim": 128, "windows": (None, 33, 500)},
        {"rows": [2], "ends": [300], "heads": 16, "kv_heads": 1, "dim": 256},
        {"rows": [1, 2], "ends": [90, 20], "heads": 6, "kv_heads": 2, "dim": 64, "softcap": 5.0},
        {"rows": [1, 2], "ends": [90, 20], "heads": 4, "kv_heads": 2, "dim": 96, "block": 8},
    ],
)
def test_is_right(name, dtype, what):
    problem = Problem(**what, dtype=dtype, device=CUDA, rest=9.0)
    assert problem.worst(backend_of(name, problem)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["varlen", "flashinfer", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_call_follows_its_input(name, dtype):
    """Other lengths and other pages, in the same places."""

    def problem_of(ends: list[int]) -> Problem:
        return Problem([1, 1, 1], ends, heads=8, dim=64, dtype=dtype, device=CUDA, windows=(None,), rest=9.0)

    problems = [problem_of([5, 290, 17]), problem_of([300, 20, 290]), problem_of([1, 2, 300])]
    shared = problems[0]
    starts, ends, tables = shared.host.starts, shared.host.ends.copy(), np.zeros((3, 40), dtype=np.int32)
    host = HostPaged(starts, ends, tables)
    moved = on_device(host, CUDA)
    paged = Paged(moved.starts, moved.ends, moved.tables, 3, 1, 40 * 16)
    query = torch.zeros_like(shared.query)
    rooms, answers = [problem.memory.data for problem in problems], [problem.right(0) for problem in problems]
    room = torch.zeros(max(map(len, rooms)), *rooms[0].shape[1:], dtype=dtype, device=CUDA)
    shared.memory.data = room
    backend = backend_of(name, shared)
    attend = repeat = None
    for problem, content, right in zip(problems, rooms, answers, strict=True):
        room[: len(content)] = content
        ends[:] = problem.host.ends
        tables[:, : problem.host.tables.shape[1]] = problem.host.tables
        paged.ends.copy_(torch.from_numpy(ends))
        paged.tables.copy_(torch.from_numpy(tables))
        query.copy_(problem.query)
        if attend is None or repeat is None:
            attend = backend.begin(paged, host, True)
            attend(0, query)
            repeat = CudaCapture()(partial(attend, 0, query))
        else:
            attend.again(host)
        answer = repeat().cpu().float()
        torch.testing.assert_close(answer, right, atol=TOLERANCE[dtype], rtol=0)


def test_something_is_chosen(tmp_path):
    directory = write_checkpoint(tmp_path / "model", TinyModel(heads=2, kv_heads=1, head_dim=64))
    runner = Runner(
        inspect(directory), EngineConfig(model=directory, dtype="bfloat16", device="cuda", kv_pool_tokens=960)
    )
    assert runner._device._attention is not None, "a CUDA build of torch brings triton"
    assert not runner.memory.data.any(), "the proof leaves nothing behind"
