"""Meshes of models whose KV is another one than keys and values of all tokens: latent vectors, and chunks.

The tokens are those of one engine, cold and cached, in one worker and handed over, and with drafts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TINY_DEEPSEEK, TINY_LLAMA_4, write_checkpoint
from penstock.testing.mesh import MeshSetup

from .conftest import TINY
from .support import BLOCK, GREEDY, SEEDED, ask, drafting, in_pages, prompt, said_alone, settled

KINDS = {"deepseek": TINY_DEEPSEEK, "deepseek in vectors": DEEPSEEK_IN_VECTORS, "llama 4": TINY_LLAMA_4}
LAYOUT = {"deepseek": "lbhd-v1", "deepseek in vectors": "lbhd-v1", "llama 4": "lkbhd-v1"}
TOKEN_BYTES = {"deepseek": 3 * (24 + 8) * 4, "deepseek in vectors": 3 * (32 + 16) * 4, "llama 4": 4 * 2 * 2 * 16 * 4}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("large") / "model", KINDS[kind])


@pytest.fixture(scope="module", params=["disaggregated", "aggregated"])
async def mesh(request, model, tmp_path_factory, meshes, http):
    """Its draft model is a plain one with the same tokenizer, which is mostly wrong."""
    draft = write_checkpoint(tmp_path_factory.mktemp("draft") / "model", replace(TINY, layers=1, seed=4))
    aggregated = request.param == "aggregated"
    options = MeshSetup(model=model, draft=str(draft), aggregated=aggregated, engine={"draft_always": True})
    async with meshes(options) as mesh:
        await drafting(http, mesh)
        yield mesh
        assert mesh.decode[0].worker.engine.stats().drafted > 50, "drafts were verified"


@pytest.fixture(scope="module")
async def alone(model):
    async with Engine.open(EngineConfig(model=model, kv_pool_tokens=8192)) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_cold_cached_and_handed_over(mesh, alone, http, sampling, request):
    first = prompt(request.node.callspec.id, 150)
    cold = await ask(http, mesh, first, sampling, session=request.node.callspec.id)
    assert cold.ids == await said_alone(alone, first, sampling)
    known = len(first) + len(cold.ids) - 1
    await settled(mesh, [*first, *cold.ids][: known // BLOCK * BLOCK])
    second = [*first, *cold.ids, *prompt("more", 100)]
    warm = await ask(http, mesh, second, sampling, session=request.node.callspec.id)
    assert warm.ids == await said_alone(alone, second, sampling)
    assert warm.cached == (known // BLOCK * BLOCK if mesh.prefill else in_pages(known))


def test_what_is_kept(mesh, kind, alone):
    """One vector for all heads, or keys and values."""
    assert {worker.engine.spec for worker in mesh.workers} == {alone.spec}
    assert alone.spec.layout == LAYOUT[kind]
    assert alone.spec.block_bytes == BLOCK * TOKEN_BYTES[kind]
