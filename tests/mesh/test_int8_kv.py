"""A mesh whose KV has 8 bits: the tokens of one engine of that kind, however the mesh serves them."""

from __future__ import annotations

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, GREEDY, ask, in_pages, prompt, said_alone, settled


@pytest.fixture(scope="module", params=["disaggregated", "aggregated"])
async def mesh(request, tiny, meshes):
    options = MeshSetup(model=tiny, aggregated=request.param == "aggregated", engine={"kv_dtype": "int8"})
    async with meshes(options) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def alone(tiny):
    async with Engine.open(EngineConfig(model=tiny, kv_pool_tokens=8192, kv_dtype="int8")) as engine:
        yield engine


async def test_cold_cached_and_handed_over(mesh, alone, http, request):
    assert {worker.engine.spec.dtype for worker in mesh.workers} == {"float32, KV int8"}
    assert {worker.engine.spec for worker in mesh.workers} == {alone.spec}
    first = prompt(request.node.callspec.id, 150)
    cold = await ask(http, mesh, first, GREEDY, session="int8")
    assert cold.ids == await said_alone(alone, first, GREEDY)
    known = len(first) + len(cold.ids) - 1
    await settled(mesh, [*first, *cold.ids][: known // BLOCK * BLOCK])
    second = [*first, *cold.ids, *prompt("more", 100)]
    warm = await ask(http, mesh, second, GREEDY, session="int8")
    assert warm.ids == await said_alone(alone, second, GREEDY)
    assert warm.cached == (known // BLOCK * BLOCK if mesh.prefill else in_pages(known))


def test_what_a_block_takes(alone):
    """Nine bits for eight: int8 of head_dim numbers, and a scale."""
    shape = alone.checkpoint.config
    assert alone.spec.block_bytes == BLOCK * 2 * shape.n_layers * shape.n_kv_heads * (shape.head_dim + 4)
    assert alone.spec.layout == "lkbhd-scaled-v1"
