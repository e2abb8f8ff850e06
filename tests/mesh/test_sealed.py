"""A mesh that seals its blocks gives the tokens of any other, and keeps nothing that a stranger can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.request import SamplingParams
from penstock.kv.client.client import Origin, StoreFault, open_store
from penstock.kv.sealing import is_sealed
from penstock.rpc.channels import open_channels
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, DRAFTING, ask, drafting, forget_pages, mesh_keys, on_host, prompt, settled

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)


def options(model: Path, path: Path, **more: Any) -> MeshSetup:
    return MeshSetup(model=model, seal=True, store={"nvme_dir": path, "nvme_bytes": 64 << 20}, **more)


async def test_hosts_hand_over_and_pull_and_draft(tiny, meshes, http, oracle) -> None:
    """A hand-off from one host to the other, blocks from the other host's store, drafts of the same model."""
    setup = MeshSetup(
        model=tiny, draft=str(tiny), decode=2, hosts=2, seal=True, router={"pull_s": 0.0}, engine=DRAFTING
    )
    async with meshes(setup) as mesh:
        await drafting(http, mesh)
        for host in ("test", "test-1"):
            on_host(mesh, host)
            for sampling in (GREEDY, DRAWN):
                tokens = prompt(f"sealed/{host}/{sampling.seed}", 9 * BLOCK + 5)
                expected = await oracle(tokens, sampling)
                assert (await ask(http, mesh, tokens, sampling)).ids == expected.ids
                await settled(mesh, tokens[: 9 * BLOCK])
                await forget_pages(mesh)
                again = await ask(http, mesh, tokens, sampling)
                assert again.ids == expected.ids
                assert again.cached == 9 * BLOCK
        assert any(store.elsewhere.figures()["pulled_blocks"] for store in mesh.kvstores), "stores speak to each other"
        assert all(worker.publisher.lending is None for worker in mesh.workers), "pages are plain, so none is lent"
        assert all(worker.store.stats.mismatches == 0 for worker in mesh.workers)


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
async def test_a_session_goes_on_from_the_disk(tiny, meshes, http, oracle, tmp_path, aggregated) -> None:
    before, tokens = [], prompt(f"sealed/disk/{aggregated}", 150)
    for turn, sampling in enumerate([GREEDY, DRAWN, GREEDY]):
        expected = await oracle(tokens, sampling)
        async with meshes(options(tiny, tmp_path, aggregated=aggregated)) as mesh:
            answer = await ask(http, mesh, tokens, sampling, session="talk")
        assert (answer.ids, answer.finish) == (expected.ids, expected.finish), turn
        cached = answer.usage["penstock"]["cached_tokens"]
        assert cached["nvme"] == answer.cached >= len(before) // BLOCK * BLOCK
        before, tokens = tokens, tokens + answer.ids + prompt(f"sealed/turn/{turn}", 20)


async def test_what_reaches_the_store_opens_nothing(tiny, meshes, http) -> None:
    """Somebody with a worker's place in the mesh, and even with the names of a tenant's blocks, but without its key."""
    tokens = prompt("sealed/thief", 6 * BLOCK + 1)
    async with meshes(MeshSetup(model=tiny, seal=True)) as mesh:
        await ask(http, mesh, tokens, GREEDY)
        await settled(mesh, tokens[: 6 * BLOCK])
        worker = mesh.workers[0]
        assert is_sealed(worker.spec)
        keys, size = mesh_keys(mesh, tokens)[:6], worker.engine.spec.block_bytes
        into = [memoryview(bytearray(size)) for _ in keys]
        async with (
            open_channels() as channels,
            open_store(channels.to(mesh.kvstore.address, "store"), "thief", worker.spec, "test") as thief,
        ):
            assert await thief.lookup(keys) == 6
            with pytest.raises(StoreFault, match="without a key"):
                await thief.fetch(keys, into)
            assert await thief.fetch(keys, into, Origin(seal=b"k" * 32)) == []
            assert not any(any(one) for one in into)


async def test_a_gateway_without_a_server_key_says_so(tiny, meshes, http) -> None:
    """Its key would be known to everybody."""
    async with meshes(MeshSetup(model=tiny, seal=True, gateway={"server_key": ""})) as mesh:
        body = {"model": "tiny", "prompt": prompt("sealed/none", 20), "max_tokens": 4}
        answer = await http.post(f"{mesh.url}/v1/completions", json=body)
        assert answer.status_code == 503
        assert "this gateway has no server_key to seal them with" in answer.json()["error"]["message"]
