"""Tenants share nothing, in any place that knows of blocks: the tenant who asked before hits, another one misses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import log, sqrt
from random import sample
from time import perf_counter
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway
from penstock.kv.identity import block_keys, root_key
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import TierKind
from penstock.testing.keys import key_file
from penstock.testing.mesh import Mesh, MeshSetup
from penstock.testing.twin import TwinDevice
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

from .support import BLOCK, DRAFTING, fast_way, forget_pages, on_host, prompt, until

pytestmark = pytest.mark.attack


SERVER_KEY = "5e" * 32
SESSION = "one key for all"
TOKENS = 20 * BLOCK
_ROUNDS, _MOST_ROUNDS = 40, 160
"""Answers of each kind that are timed: more where a neighbour of the test blurs what there is to see."""


def used(answer: Completion) -> dict[str, int]:
    """Where the prompt's tokens came from, zeros left out."""
    return {tier: count for tier, count in answer.usage.model_extra["penstock"]["cached_tokens"].items() if count}


@dataclass
class Tenants:
    """A mesh and its two tenants."""

    mesh: Mesh
    clients: dict[str, AsyncOpenAI]

    async def cached(self, tenant: str, tokens: list[int], in_pages: bool = False) -> dict[str, int]:
        """Asks, with the same session key whoever asks; where the prompt's tokens came from, zeros left out. Without
        `in_pages` the workers have forgotten what they had in theirs."""
        if not in_pages:
            await forget_pages(self.mesh)
        answer = await self.clients[tenant].completions.create(
            model="tiny",
            prompt=tokens,
            max_tokens=1,
            extra_headers={"x-session-affinity": SESSION},
            extra_body={"prompt_cache_key": SESSION},
        )
        return used(answer)

    def keys(self, tenant: str, tokens: list[int]) -> list[bytes]:
        """The block keys of a tenant."""
        spec = self.mesh.workers[0].engine.spec
        return block_keys(root_key(spec, self.mesh.gateway.reception.auth.namespace(tenant)), tokens, spec.block_size)

    async def settled(self, tenant: str, tokens: list[int]) -> None:
        """Returns when the store and the router's index know every block."""
        keys, index = self.keys(tenant, tokens), self.mesh.router.planner.index
        await until(lambda: self.mesh.kvstore.store.lookup(keys) == len(keys), "the store holds the blocks")
        await until(lambda: len(keys) in index.match(keys).values(), "the router's index holds the blocks")


@pytest.fixture
def opened(tiny, meshes, tmp_path):
    """Opens a mesh with two tenants, for the length of a block."""
    file = key_file(tmp_path / "keys.json", {"key-a": "a", "key-b": "b"})

    @asynccontextmanager
    async def opened(**more: Any) -> AsyncIterator[Tenants]:
        options = MeshSetup(model=tiny, gateway={"api_keys": file, "server_key": SERVER_KEY}, **more)
        async with meshes(options) as mesh, AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="key-a") as a:
            async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="key-b") as b:
                yield Tenants(mesh, {"a": a, "b": b})

    return opened


@pytest.fixture
async def tenants(opened) -> AsyncIterator[Tenants]:
    async with opened() as tenants:
        yield tenants


async def test_host(tenants: Tenants) -> None:
    tokens = prompt("host", TOKENS)
    assert await tenants.cached("a", tokens) == {}
    await tenants.settled("a", tokens)
    assert await tenants.cached("b", tokens) == {}, "b is told nothing of what a asked"
    await tenants.settled("b", tokens)
    for tenant in "ab":
        assert await tenants.cached(tenant, tokens) == {"host": TOKENS - BLOCK}


async def test_a_worker_s_own_pages(opened) -> None:
    tokens = prompt("worker", TOKENS)
    async with opened(aggregated=True) as tenants:
        assert await tenants.cached("a", tokens) == {}
        assert await tenants.cached("b", tokens, in_pages=True) == {}
        for tenant in "ab":
            assert await tenants.cached(tenant, tokens, in_pages=True) == {"worker": TOKENS - 1}


async def test_nvme(opened, tmp_path) -> None:
    """Also after a restart of the whole mesh, when the disk is all that is left."""
    tokens = prompt("nvme", TOKENS)
    disk = {"nvme_dir": tmp_path / "kv", "nvme_bytes": 64 << 20}
    async with opened(store=disk) as tenants:
        await tenants.cached("a", tokens)
        await tenants.settled("a", tokens)
        [tier] = [one for one in tenants.mesh.kvstore.store.tiers.kept if one.kind is TierKind.NVME]
        await until(lambda: tier.has_blocks(tenants.keys("a", tokens)) == TOKENS // BLOCK, "the blocks are on the disk")
        assert tier.has_blocks(tenants.keys("b", tokens)) == 0
    async with opened(store=disk) as tenants:
        assert await tenants.cached("b", tokens) == {}
        assert await tenants.cached("a", tokens) == {"nvme": TOKENS - BLOCK}
    namespaces = {tenants.mesh.gateway.reception.auth.namespace(tenant)[:16] for tenant in "ab"}
    written = b"".join(file.read_bytes() for file in (tmp_path / "kv").rglob("*") if file.is_file())
    assert all(namespace in written for namespace in namespaces), "a header says whose its block is"
    assert SERVER_KEY.encode() not in written
    assert bytes.fromhex(SERVER_KEY) not in written


async def test_gpu(opened) -> None:
    """Over a twin of a device: the blocks are there and nowhere else."""
    tokens = prompt("gpu", TOKENS)
    config = KvStoreConfig(host_bytes=3 << 20, gpu_bytes=2 << 20, host_id="test", tenant_share=1.0)
    async with open_kvstore(config, TwinDevice) as store, opened(kvstore=store.address) as tenants:
        keys = tenants.keys("a", tokens)
        for _ in range(2):
            await tenants.cached("a", tokens)
            await until(lambda: store.host.table.lookup(keys) == len(keys), "the store holds the blocks")
        await until(lambda: store.gpu.has_blocks(keys) >= len(keys) - 1, "what was fetched is on the device")
        number = 0
        while keys[0] in store.host.table:
            number += 1
            flood = prompt(f"flood {number}", 100 * BLOCK)
            await tenants.clients["b"].completions.create(model="tiny", prompt=flood, max_tokens=1)
        assert store.gpu.has_blocks(keys) >= len(keys) - 1
        assert store.gpu.has_blocks(tenants.keys("b", tokens)) == 0
        assert await tenants.cached("b", tokens) == {}
        assert await tenants.cached("a", tokens) == {"gpu": TOKENS - BLOCK}


async def test_the_router_s_index(tenants: Tenants) -> None:
    tokens = prompt("index", TOKENS)
    await tenants.cached("a", tokens)
    await tenants.settled("a", tokens)
    index = tenants.mesh.router.planner.index
    depths = index.match(tenants.keys("a", tokens)).values()  # of the store, and of workers that have told already
    assert set(depths) == {TOKENS // BLOCK}
    assert index.match(tenants.keys("b", tokens)) == {}


async def test_events(tenants: Tenants) -> None:
    """The same prompt of two tenants has nothing in common that a listener could see."""
    tokens = prompt("events", TOKENS)
    stub = kvstore_pb2_grpc.KvStoreStub(tenants.mesh.workers[0].channels.to(tenants.mesh.kvstore.address, "store"))
    told: dict[str, set[bytes]] = {}
    raw = b""
    events = stub.Events(kvstore_pb2.EventsRequest())
    assert (await events.read()).snapshot
    for tenant in "ab":
        await tenants.cached(tenant, tokens)
        await tenants.settled(tenant, tokens)
        seen: set[bytes] = set()
        while len(seen) < TOKENS // BLOCK:
            message: Any = await events.read()
            raw += message.SerializeToString()
            seen.update(message.stored)
        told[tenant] = seen
    events.cancel()
    assert told["a"] == set(tenants.keys("a", tokens))
    assert told["b"] == set(tenants.keys("b", tokens))
    assert not told["a"] & told["b"]
    assert not {key[-8:] for key in told["a"]} & {key[-8:] for key in told["b"]}, "nor in the form of vLLM"
    for tenant in "ab":
        namespace = tenants.mesh.gateway.reception.auth.namespace(tenant)
        assert namespace[:16] not in raw
        assert namespace[16:] not in raw


async def test_promises_and_sessions(tenants: Tenants) -> None:
    """Each has its own budget, whatever the other has used of his; and the same session key is two sessions."""
    slots = tenants.mesh.kvstore.stats().slots
    for tenant in "ab":
        answer = await tenants.clients[tenant].completions.create(
            model="tiny",
            prompt=prompt("promise", min(1900, slots // 8 * BLOCK)),
            max_tokens=1,
            extra_headers={"x-session-affinity": SESSION},
            extra_body={"penstock": {"retain": "1m"}},
        )
        assert answer.usage.model_extra["penstock"]["retained_s"] == 60.0
    assert len(tenants.mesh.kvstore.store.sessions) == 2


async def test_another_server_key_is_another_world(tenants: Tenants, meshes, tiny) -> None:
    """A second gateway before the same workers: with the same key it finds what the first one had computed."""
    tokens = prompt("server key", TOKENS)
    await tenants.cached("a", tokens)
    await tenants.settled("a", tokens)
    first = tenants.mesh.gateway.reception.config
    there = ({"worker": TOKENS - 1}, {"host": TOKENS - BLOCK})  # in pages, or in the store
    for key, found in (("77" * 32, ({},)), (SERVER_KEY, there)):
        config = GatewayConfig(
            router=first.router,
            model_dir=first.model_dir,
            model_name=first.model_name,
            http_address="127.0.0.1:0",
            api_keys=first.api_keys,
            server_key=key,
        )
        async with open_gateway(config) as gateway:
            await gateway.ready()
            async with AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="key-a") as client:
                answer = await client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
                assert used(answer) in found


async def test_another_hosts_store(opened) -> None:
    """What the one host's store holds is fetched by the other for the tenant that made it, and for nobody else."""
    async with opened(hosts=2, decode=2, aggregated=True, router={"pull_s": 0.0}) as tenants:
        await fast_way(tenants.mesh)
        tokens = prompt("remote", TOKENS)
        on_host(tenants.mesh, "test")
        assert await tenants.cached("a", tokens) == {}
        await tenants.settled("a", tokens)
        on_host(tenants.mesh, "test-1")
        assert await tenants.cached("b", tokens) == {}
        assert await tenants.cached("a", tokens) == {"remote": TOKENS - BLOCK}


async def test_the_time_of_an_answer_tells_nothing_of_others(opened) -> None:
    """A tenant asks for what another has cached, for what nobody has, and for what it has cached itself. By time it can
    tell the last from the first two, and these not from each other (Kolmogorov and Smirnov's test of two samples, with
    a chance of one in ten thousand to be wrong)."""
    seconds: dict[str, list[float]] = {"others": [], "nobodys": [], "own": []}

    def differ(one: str, other: str) -> bool:
        limit = sqrt(-log(0.0001 / 2) / 2) * sqrt(2 / len(seconds[one]))
        return distance(seconds[one], seconds[other]) > limit

    async with opened(aggregated=True) as tenants:
        for number in range(-4, _MOST_ROUNDS):
            tokens = {kind: prompt(f"timing/{kind}/{number}", 60 * BLOCK) for kind in seconds}
            await tenants.cached("b", tokens["others"], in_pages=True)
            await tenants.cached("a", tokens["own"], in_pages=True)
            for kind in sample(list(seconds), 3):
                begin = perf_counter()
                cached = await tenants.cached("a", tokens[kind], in_pages=True)
                if number >= 0:  # the first ones warm up
                    seconds[kind].append(perf_counter() - begin)
                assert bool(cached) is (kind == "own")
            if number + 1 >= _ROUNDS and differ("own", "nobodys"):
                break
    assert differ("own", "nobodys"), "the test sees what there is to see"
    assert not differ("others", "nobodys")


async def test_drafts_tell_nothing_of_others(opened, tiny) -> None:
    """What the draft model has computed for one tenant it computes again for another: by count, of which time is a
    consequence. That texts of others are not guessed from, tests of the lookup say."""
    async with opened(aggregated=True, draft=str(tiny), engine=DRAFTING) as tenants:
        registry = tenants.mesh.draft.metrics.registry

        def told() -> dict[str, float]:
            [found] = [one for one in registry.collect() if one.name == "penstock_draft_told_tokens"]
            return {sample.labels["source"]: sample.value for sample in found.samples}

        async def computed(tenant: str, tokens: list[int]) -> float:
            """Tokens of the prompt that the draft has computed, and not taken from what it had."""
            before = told()
            await tenants.clients[tenant].completions.create(model="tiny", prompt=tokens, max_tokens=4, temperature=0)
            whole = sum(before.values()) + len(tokens) - 1
            await until(lambda: sum(told().values()) >= whole, "the draft has taken in the prompt")
            return told()["computed"] - before["computed"]

        for number in range(4):
            tokens = prompt(f"drafts/{number}", 10 * BLOCK)
            alone = await computed("b", tokens)
            assert alone >= 9 * BLOCK
            assert await computed("a", tokens) >= 9 * BLOCK, "as if nobody had asked"
            assert await computed("a", tokens) <= 2 * BLOCK, "the test sees what there is to see"


def distance(one: list[float], other: list[float]) -> float:
    """The largest between the two samples' distribution functions."""
    return max(
        abs(sum(value <= at for value in one) / len(one) - sum(value <= at for value in other) / len(other))
        for at in (*one, *other)
    )
