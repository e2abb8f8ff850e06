"""Meshes of models whose layers forget: of a long prefix workers fetch little, and say what one engine says."""

from __future__ import annotations

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import SamplingParams
from penstock.kv.parts import PARTED_LAYOUT
from penstock.testing.checkpoints import TINY_LLAMA_4, TinyModel, write_checkpoint
from penstock.testing.mesh import Mesh, MeshSetup

from .support import BLOCK, ask, forget_pages, mesh_keys, prompt, said_alone, settled

SHORT = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
GEMMA = TinyModel(
    "Gemma3ForCausalLM",
    vocab_size=260,
    layers=6,
    seed=5,
    extra={"sliding_window": 40, "query_pre_attn_scalar": 16, "sliding_window_pattern": 3},
)
KINDS = {"gemma 3": GEMMA, "llama 4": TINY_LLAMA_4}
LONG = 30 * BLOCK + 5


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("forgets") / "model", KINDS[request.param])


@pytest.fixture(scope="module")
async def alone(model):
    async with Engine.open(EngineConfig(model=model, kv_pool_tokens=8192)) as engine:
        yield engine


def far(mesh: Mesh) -> int:
    """Blocks that were fetched without their near parts."""
    return sum(worker.store.stats.far for worker in mesh.workers)


WAYS = {
    "aggregated": {"aggregated": True},
    "handed over": {},
    "copied": {"aggregated": True, "worker": {"lend": False}},
    "streamed": {"aggregated": True, "worker": {"host_id": "elsewhere"}},
}


@pytest.mark.parametrize("way", WAYS)
async def test_cold_cached_and_shorter(way, model, alone, meshes, http):
    async with meshes(MeshSetup(model=model, **WAYS[way])) as mesh:
        assert all(worker.spec.layout.endswith(PARTED_LAYOUT) for worker in mesh.workers)
        tokens = prompt("long", LONG)

        async def says(asked: list[int]) -> int:
            answer = await ask(http, mesh, asked, SHORT)
            assert answer.ids == await said_alone(alone, asked, SHORT)
            return answer.cached

        await says(tokens)
        await settled(mesh, tokens[: 30 * BLOCK])
        await forget_pages(mesh)
        before = far(mesh)
        assert await says(tokens + prompt("from the store", 50)) == 30 * BLOCK
        assert far(mesh) >= before + 25
        assert await says(tokens + prompt("from the pages", 30)) >= 30 * BLOCK
        assert await says(tokens[: 20 * BLOCK] + prompt("a shorter prefix", 30)) == 20 * BLOCK
        assert await says(tokens[: 3 * BLOCK] + prompt("a very short prefix", 30)) == 3 * BLOCK
        assert await says(tokens + prompt("all of it again", 30)) >= 30 * BLOCK
