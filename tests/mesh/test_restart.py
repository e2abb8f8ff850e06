"""A session goes on after everything has been stopped and started again: from the disk, with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, ask, prompt

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)


def options(model: Path, path: Path, **more: Any) -> MeshSetup:
    return MeshSetup(model=model, store={"nvme_dir": path, "nvme_bytes": 64 << 20}, **more)


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
async def test_the_next_turn_of_an_old_session(tiny, meshes, http, oracle, tmp_path, aggregated) -> None:
    """Four lives of the mesh, one turn in each."""
    before, tokens = [], prompt(f"restart/{aggregated}", 150)
    for turn, sampling in enumerate([GREEDY, DRAWN, GREEDY, DRAWN]):
        expected = await oracle(tokens, sampling)
        async with meshes(options(tiny, tmp_path, aggregated=aggregated)) as mesh:
            answer = await ask(http, mesh, tokens, sampling, session="talk")
            stats = mesh.kvstore.disk.figures()
        assert (answer.ids, answer.finish) == (expected.ids, expected.finish), turn
        cached = answer.usage["penstock"]["cached_tokens"]
        assert cached["nvme"] == answer.cached >= len(before) // BLOCK * BLOCK
        assert (answer.cached > 0) == (turn > 0)
        assert stats["corrupt"] == 0
        before, tokens = tokens, tokens + answer.ids + prompt(f"turn/{turn}", 20)


async def test_a_disk_that_rots_costs_time_only(tiny, meshes, http, oracle, tmp_path) -> None:
    tokens = prompt("rot", 200)
    expected = await oracle(tokens, GREEDY)
    async with meshes(options(tiny, tmp_path)) as mesh:
        await ask(http, mesh, tokens, GREEDY)
    for slab in tmp_path.glob("*/slab-*.blocks"):
        data = bytearray(slab.read_bytes())
        data[5000::8192] = bytes(byte ^ 1 for byte in data[5000::8192])
        slab.write_bytes(data)
    async with meshes(options(tiny, tmp_path)) as mesh:
        answer = await ask(http, mesh, tokens, GREEDY)
        stats = mesh.kvstore.disk.figures()
    assert answer.ids == expected.ids
    assert stats["corrupt"] + stats["torn"] > 0


async def test_another_model_over_the_same_directory(tiny, other, meshes, http, tmp_path) -> None:
    tokens = prompt("models", 200)
    answers = {}
    for model in (tiny, other):
        async with meshes(MeshSetup(model=model, kvstore=False)) as mesh:
            answers[model] = (await ask(http, mesh, tokens, GREEDY)).ids
    assert answers[tiny] != answers[other]
    for model, cached in ((tiny, False), (other, False), (tiny, True), (other, True)):
        async with meshes(options(model, tmp_path)) as mesh:
            answer = await ask(http, mesh, tokens, GREEDY)
        assert answer.ids == answers[model]
        assert (answer.cached > 0) == cached
