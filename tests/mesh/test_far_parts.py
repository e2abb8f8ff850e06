"""Meshes of models whose layers forget: of a long prefix workers fetch little, and say what one engine says."""

from __future__ import annotations

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import SamplingParams
from penstock.kv.parts import PARTED_LAYOUT
from penstock.kv.sealing import is_sealed
from penstock.testing.checkpoints import TINY_LLAMA_4, TinyModel, write_checkpoint
from penstock.testing.mesh import Mesh, MeshSetup

from .support import BLOCK, ask, forget_pages, mesh_keys, on_host, prompt, said_alone, settled

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


async def answered(http, mesh: Mesh, alone: Engine, tokens: list[int]) -> int:
    """How many tokens were cached of a prompt whose answer is the one engine's."""
    answer = await ask(http, mesh, tokens, SHORT)
    assert answer.ids == await said_alone(alone, tokens, SHORT)
    return answer.cached


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
@pytest.mark.parametrize("at", [4, 29])
async def test_what_is_damaged_in_the_store(model, alone, meshes, http, aggregated, at):
    """Early on, where the near part is of no use any more, and at the end."""
    setup = MeshSetup(model=model, aggregated=aggregated, worker={"lend": False})
    async with meshes(setup) as mesh:
        parts = mesh.workers[0].engine.parts
        tokens = prompt(f"damaged {at}", LONG)
        await answered(http, mesh, alone, tokens)
        await settled(mesh, tokens[: 30 * BLOCK])
        await forget_pages(mesh)
        key = mesh_keys(mesh, tokens)[at]
        block = mesh.kvstore.host.table.find(key)
        mesh.kvstore.host.view(block)[parts.near[0][0]] ^= 1
        cached = await answered(http, mesh, alone, tokens + prompt("near", 40))
        assert cached == (30 if at == 4 else at) * BLOCK
        await settled(mesh, tokens[: 30 * BLOCK])
        await forget_pages(mesh)
        block = mesh.kvstore.host.table.find(key)
        mesh.kvstore.host.view(block)[parts.far[0][0]] ^= 1
        assert await answered(http, mesh, alone, tokens + prompt("far", 40)) == at * BLOCK
        await settled(mesh, tokens[: 30 * BLOCK])
        assert sum(worker.store.stats.mismatches for worker in mesh.workers) == (1 if at == 4 else 2)


async def test_a_session_goes_on_from_the_disk(model, alone, meshes, http, tmp_path):
    tokens = prompt("disk", LONG)
    setup = MeshSetup(model=model, aggregated=True, store={"nvme_dir": tmp_path, "nvme_bytes": 64 << 20})
    async with meshes(setup) as mesh:
        await answered(http, mesh, alone, tokens)
        await settled(mesh, tokens[: 30 * BLOCK])
    async with meshes(setup) as mesh:
        assert await answered(http, mesh, alone, tokens + prompt("after a night", 40)) == 30 * BLOCK
        assert far(mesh) >= 25
        assert await answered(http, mesh, alone, tokens[: 20 * BLOCK] + prompt("shorter", 40)) == 20 * BLOCK


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
async def test_the_far_part_of_a_sealed_block_is_opened_alone(model, alone, meshes, http, aggregated):
    tokens = prompt("sealed", LONG)
    async with meshes(MeshSetup(model=model, aggregated=aggregated, seal=True)) as mesh:
        await answered(http, mesh, alone, tokens)
        await settled(mesh, tokens[: 30 * BLOCK])
        await forget_pages(mesh)
        before = far(mesh)
        assert await answered(http, mesh, alone, tokens + prompt("more", 40)) == 30 * BLOCK
        assert far(mesh) >= before + 25 and is_sealed(mesh.workers[0].spec)
        assert await answered(http, mesh, alone, tokens[: 20 * BLOCK] + prompt("shorter", 40)) == 20 * BLOCK


async def test_another_host_s_store_gives_whole_blocks_and_its_worker_takes_the_far_parts(model, alone, meshes, http):
    tokens = prompt("hosts", LONG)
    setup = MeshSetup(model=model, aggregated=True, decode=2, hosts=2, router={"pull_s": 0.0})
    async with meshes(setup) as mesh:
        on_host(mesh, "test")
        await answered(http, mesh, alone, tokens)
        await settled(mesh, tokens[: 30 * BLOCK])
        on_host(mesh, "test-1")
        assert await answered(http, mesh, alone, tokens + prompt("there", 40)) == 30 * BLOCK
        assert sum(store.elsewhere.figures()["pulled_blocks"] for store in mesh.kvstores) == 30
        assert far(mesh) >= 25
        assert await answered(http, mesh, alone, tokens[: 20 * BLOCK] + prompt("shorter", 40)) == 20 * BLOCK
