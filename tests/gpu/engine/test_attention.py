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
from penstock.engine.kernels.cuda.paged import GatherPaged, HostPaged, Paged, host_paged, on_device
from penstock.testing.checkpoints import TinyModel, write_checkpoint

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}

FAN = tuple((at, at - 1, 34 + at) for at in range(1, 9))
"""Each sequence begins like the one before it: with at least 34 pages, two whole chunks, and as many as flashinfer puts
in a cascade."""


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
        {
            "rows": [1] * 9,
            "ends": [1400] * 9,
            "heads": 32,
            "kv_heads": 4,
            "dim": 128,
            "windows": (None, 600),
            "shares": FAN,
        },
        {
            "rows": [1, 3, 40, 2, 1],
            "ends": [900, 800, 840, 700, 30],
            "heads": 6,
            "kv_heads": 2,
            "dim": 64,
            "shares": FAN[:3],
        },
    ],
)
def test_is_right(name, dtype, what):
    problem = Problem(**what, dtype=dtype, device=CUDA, rest=9.0)
    assert problem.worst(backend_of(name, problem)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[1] * 9, [1, 2, 5, 1, 3, 1, 1, 16, 1]])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_rows_that_share_pages_are_what_each_is_alone(dtype, rows, group):
    """Bit for bit in our own kernels, wherever in a product a row stands."""
    problem = Problem(
        rows,
        [1400, 1300, 1390, 1200, 1000, 1111, 1050, 980, 1024],
        heads=2 * group,
        dim=128,
        windows=(None, 300),
        shares=FAN,
        dtype=dtype,
        device=CUDA,
        rest=9.0,
    )
    backend = backend_of("triton", problem)
    for layer in range(2):
        together = backend.begin(problem.paged, problem.host, False)(layer, problem.query)
        for at, own in enumerate(together.split(rows)):
            first, table = sum(rows[:at]), problem.tables[at]
            host = host_paged([problem.ends[at]], [rows[at]], [table], len(table))
            alone = backend.begin(on_device(host, CUDA), host, False)
            assert torch.equal(alone(layer, problem.query[first : first + rows[at]]), own)


@pytest.mark.parametrize("name", ["varlen", "flashinfer", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_call_follows_its_input(name, dtype):
    """Other lengths and other pages, in the same places."""

    def problem_of(ends: list[int], shares: tuple[tuple[int, int, int], ...] = ()) -> Problem:
        return Problem(
            [1, 1, 1], ends, heads=8, dim=64, dtype=dtype, device=CUDA, windows=(None,), rest=9.0, shares=shares
        )

    problems = [problem_of([5, 290, 17]), problem_of([300, 20, 290]), problem_of([1, 2, 300])]
    problems += [problem_of([300, 600, 590], ((1, 0, 17), (2, 1, 35))), problem_of([600, 599, 590], ((2, 0, 36),))]
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
