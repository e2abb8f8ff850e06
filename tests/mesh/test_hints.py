"""Retention and session hints in a whole mesh: from the official client to the store's tables."""

from __future__ import annotations

import httpx2
import pytest
from openai import AsyncOpenAI

from penstock.gateway.accounts.auth import session_digest
from penstock.kvstore.sessions import SessionPhase
from penstock.kvstore.table.blocks import TierKind
from penstock.testing.mesh import Mesh, MeshSetup

from .support import BLOCK, forget_pages, mesh_keys, prompt, settled, until

SLOTS_BYTES = 3 << 20
SESSION = {"x-session-affinity": "talk"}
DIGEST = session_digest("default", SESSION, None)


@pytest.fixture(params=[False, True], ids=["disaggregated", "aggregated"])
async def mesh(request, tiny, meshes):
    async with meshes(MeshSetup(model=tiny, aggregated=request.param, kv_host_bytes=SLOTS_BYTES)) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh):
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def flood(mesh: Mesh, client: AsyncOpenAI) -> None:
    """Prompts of others, until every slot has been used twice."""
    store = mesh.kvstore
    number = 0
    before = store.stats().evictions
    while store.stats().evictions - before < 2 * store.stats().slots:
        number += 1
        tokens = prompt(f"flood/{number}", 1600)
        await client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
        await settled(mesh, tokens)


async def cached(client: AsyncOpenAI, tokens: list[int]) -> int:
    answer = await client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
    return answer.usage.prompt_tokens_details.cached_tokens


async def test_what_is_retained_survives_a_flood_that_lru_does_not(mesh, client) -> None:
    kept, lost = prompt("kept", 10 * BLOCK), prompt("lost", 10 * BLOCK)
    for tokens, body in ((kept, {"penstock": {"retain": "10m"}}), (lost, {})):
        answer = await client.completions.create(
            model="tiny", prompt=tokens, max_tokens=2 * BLOCK + 1, temperature=0, extra_body=body | {"ignore_eos": True}
        )
        told = answer.usage.model_extra["penstock"]
        granted = (600.0, 12 * BLOCK) if body else (0.0, 0)
        assert (told["retained_s"], told["retained_tokens"]) == granted, "prompt and answer"
        await settled(mesh, tokens)
    assert mesh.kvstore.stats().retained == 12
    await flood(mesh, client)
    assert await cached(client, lost) == 0
    assert await cached(client, kept) == 9 * BLOCK, "the last token is computed, for its logits"


async def test_one_tenant_has_its_budget_and_the_grant_says_so(mesh, client) -> None:
    """More is asked for than an eighth of the store; a longer time, too, than is granted."""
    slots = mesh.kvstore.stats().slots
    tokens = prompt("much", (slots // 8 + 5) * BLOCK)
    answer = await client.completions.create(
        model="tiny", prompt=tokens, max_tokens=1, extra_body={"penstock": {"retain": "24h"}}
    )
    told = answer.usage.model_extra["penstock"]
    assert (told["retained_s"], told["retained_tokens"]) == (3600.0, slots // 8 * BLOCK)
    answer = await client.completions.create(
        model="tiny", prompt=prompt("more", 64), max_tokens=1, extra_body={"penstock": {"retain": "1m"}}
    )
    told = answer.usage.model_extra["penstock"]
    assert (told["retained_s"], told["retained_tokens"]) == (0.0, 0)


async def test_the_store_hears_what_a_session_does(mesh, client) -> None:
    sessions = mesh.kvstore.store.sessions

    def state() -> SessionPhase | None:
        outlook = sessions.known(DIGEST)
        return outlook.state if outlook is not None else None

    stream = await client.completions.create(
        model="tiny", prompt=prompt("talk", 64), max_tokens=200, stream=True, extra_headers=SESSION,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    await anext(aiter(stream))
    await until(lambda: state() is SessionPhase.ACTIVE, "a request runs")
    await stream.close()
    await until(lambda: state() is SessionPhase.USER, "the client hung up")
    body = {"penstock": {"session": {"returns_in": 30}}}
    await client.completions.create(
        model="tiny", prompt=prompt("talk", 64), max_tokens=2, extra_headers=SESSION, extra_body=body
    )
    now = mesh.kvstore.store.now
    await until(lambda: 25 < sessions.known(DIGEST).expected_at - now() <= 30, "it said when it returns")
    async with httpx2.AsyncClient() as http:
        await http.post(f"{mesh.url}/v1/sessions/hint", json={"ended": True}, headers=SESSION)
    await until(lambda: state() is SessionPhase.ENDED, "it was said to be over")


async def test_a_session_that_is_expected_is_brought_from_the_disk_before_it_asks(meshes, tiny, tmp_path) -> None:
    disk = {"nvme_dir": tmp_path, "nvme_bytes": 64 << 20}
    tokens = prompt("back soon", 20 * BLOCK)
    async with meshes(MeshSetup(model=tiny, kv_host_bytes=SLOTS_BYTES, store=disk)) as mesh:
        async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
            await client.completions.create(model="tiny", prompt=tokens, max_tokens=1, extra_headers=SESSION)
            store, keys = mesh.kvstore, mesh_keys(mesh, tokens)
            [disk] = [one for one in store.store.tiers.kept if one.kind is TierKind.NVME]
            await until(lambda: disk.has_blocks(keys) == 20, "the blocks are on the disk")
            await flood(mesh, client)
            assert store.host.table.lookup(keys) == 0
            async with httpx2.AsyncClient() as http:
                await http.post(f"{mesh.url}/v1/sessions/hint", json={"returns_in": "1s"}, headers=SESSION)
            await until(lambda: store.host.table.lookup(keys) == 20, "the blocks are in memory")
            await forget_pages(mesh)
            answer = await client.completions.create(model="tiny", prompt=tokens, max_tokens=1, extra_headers=SESSION)
            assert answer.usage.model_extra["penstock"]["cached_tokens"]["host"] == 19 * BLOCK


async def test_blocks_know_their_session_and_what_they_cost(mesh, client) -> None:
    tokens = prompt("known", 600)
    await client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
    await settled(mesh, tokens)
    blocks = [mesh.kvstore.host.find_block(key) for key in mesh_keys(mesh, tokens)]
    assert {block.session for block in blocks} == {""}
    answer = await client.completions.create(model="tiny", prompt=tokens[:320], max_tokens=1, extra_headers=SESSION)
    # In pages of whoever computes the rest, all but the last token of it, or in the store.
    cached = answer.usage.model_extra["penstock"]["cached_tokens"]
    assert (cached["worker"], cached["host"]) in ((20 * BLOCK - 1, 0), (0, 19 * BLOCK))
    await until(lambda: [block.session for block in blocks[:19]] == [DIGEST] * 19, "it has heard of their use")
    assert {block.session for block in blocks[20:]} == {""}
    assert {len(block.namespace) for block in blocks} == {16}
    assert 0 < blocks[32].seconds <= blocks[36].seconds
