"""Blocks that a worker lends, in a whole mesh: one copy on a host, and nothing lost when the worker is."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, ask, mesh_keys, process, prompt, settled, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = replace(SHORT, max_tokens=40)


async def test_a_block_is_on_its_host_once(meshes, tiny, http, oracle):
    """Sessions with a common beginning, in one worker: nothing of it is in the store's own memory."""
    common = prompt("common", 40 * BLOCK)
    async with meshes(MeshSetup(model=tiny, aggregated=True)) as mesh:
        for number in range(4):
            tokens = common + prompt(f"own/{number}", 20)
            assert (await ask(http, mesh, tokens, SHORT)).ids == (await oracle(tokens, SHORT)).ids
            await settled(mesh, tokens)
        [worker] = mesh.workers
        assert len(worker.publisher.lending) == len(mesh.kvstore.host.lent) == worker.engine.stats().resident_pages
        assert mesh.kvstore.stats().blocks == mesh.kvstore.stats().used_bytes == 0
        assert worker.publisher.lending.lost == 0


async def test_kill_9_of_the_lender_costs_the_next_turn_nothing(meshes, tiny, http, oracle):
    """A session runs on a worker of its own process, which is killed; its next turn is served from the store."""
    async with meshes(MeshSetup(model=tiny, aggregated=True)) as mesh:
        [seat] = [one for one in mesh.router.planner.registry if one.member.role]
        store = ["--kvstore", mesh.kvstore.address, "--host-id", "test", "--role", "both"]
        served = ["--router", mesh.router.address, "--model", str(tiny), "--model-name", "tiny"]
        async with process("decode", *store, *served) as (address, pid):
            seats = mesh.router.planner.registry
            await until(lambda: any(one.member.address == address for one in seats), "the other one has joined", 30)
            seat.drain()
            tokens = prompt("killed", 300)
            first = await ask(http, mesh, tokens, LONG, session="s")
            assert first.ids == (await oracle(tokens, LONG)).ids
            full = [*tokens, *first.ids]
            blocks = (len(full) - 1) // BLOCK * BLOCK
            await settled(mesh, full[:blocks])
            assert mesh.kvstore.stats().blocks == 0, "they are lent"
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not any(one.member.address == address for one in seats), "the router knows")
            seat.drain(False)
            again = [*full, *prompt("more", 10)]
            answer = await ask(http, mesh, again, SHORT, session="s")
            assert answer.ids == (await oracle(again, SHORT)).ids
            assert answer.usage["penstock"]["cached_tokens"]["host"] == blocks
            await until(lambda: len(mesh.kvstore.host.lent) <= 4, "the store has copied them")
            assert mesh.kvstore.store.lookup(mesh_keys(mesh, full[:blocks])) == blocks // BLOCK


async def test_another_worker_takes_what_one_has_lent(meshes, tiny, http, oracle):
    async with meshes(MeshSetup(model=tiny, aggregated=True, decode=2)) as mesh:
        one, two = (seat for seat in mesh.router.planner.registry if seat.member.role)
        tokens = prompt("other", 200)
        two.drain()
        await ask(http, mesh, tokens, SHORT)
        await settled(mesh, tokens[: 12 * BLOCK])
        one.drain()
        two.drain(False)
        answer = await ask(http, mesh, tokens, SHORT)
        assert answer.ids == (await oracle(tokens, SHORT)).ids
        assert answer.usage["penstock"]["cached_tokens"]["host"] == 12 * BLOCK


async def test_what_leaves_the_pages_is_in_the_store(meshes, tiny, http, oracle):
    """Far more sessions than there is room for in the pages; all of them go on from the store."""
    setup = MeshSetup(model=tiny, aggregated=True, engine={"kv_pool_tokens": 100 * BLOCK, "max_batch_tokens": 64})
    async with meshes(setup) as mesh:
        [worker] = mesh.workers
        prompts = [prompt(f"many/{number}", 20 * BLOCK + 1) for number in range(30)]
        for tokens in prompts:
            await ask(http, mesh, tokens, SHORT)
            await settled(mesh, tokens[: 20 * BLOCK])
        assert worker.publisher.lending.lost == 0
        for tokens in prompts:
            answer = await ask(http, mesh, tokens, SHORT)
            assert answer.ids == (await oracle(tokens, SHORT)).ids
            assert answer.cached == 20 * BLOCK
        assert worker.engine.stats().resident_pages <= 100


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
async def test_a_store_that_comes_back_is_lent_what_there_is(meshes, tiny, http, oracle, aggregated):
    async with process("kvstore", "--host-bytes", "64MiB", "--host-id", "test") as (address, pid):
        async with meshes(MeshSetup(model=tiny, aggregated=aggregated, kvstore=address)) as mesh:
            tokens = prompt("back", 200)
            first = await ask(http, mesh, tokens, LONG)
            os.kill(pid, signal.SIGKILL)
            decode = mesh.decode[0].worker
            await until(lambda: not decode.store.connected, "the worker knows")
            async with process("kvstore", "--host-bytes", "64MiB", "--host-id", "test", "--address", address):
                await until(lambda: decode.publisher.lending.on, "the worker has found the new one", 30)
                lent = list(decode.publisher.lending._loans)
                assert len(lent) == (14 if aggregated else 2)
                await until(lambda: decode.publisher.known.leading(lent) == len(lent), "it is lent everything")
                for key in lent:
                    assert await decode.store.lookup([key]) == 1
                again = [*tokens, *first.ids]
                assert (await ask(http, mesh, again, SHORT)).ids == (await oracle(again, SHORT)).ids


@pytest.mark.parametrize("setting", [{"lend": False}, {"host_id": "elsewhere"}], ids=["no-lend", "elsewhere"])
async def test_the_other_way_is_there_where_it_is_asked_for_or_needed(meshes, tiny, http, oracle, setting):
    async with meshes(MeshSetup(model=tiny, aggregated=True, worker=setting)) as mesh:
        tokens = prompt("copied", 200)
        assert (await ask(http, mesh, tokens, SHORT)).ids == (await oracle(tokens, SHORT)).ids
        await settled(mesh, tokens[: 12 * BLOCK])
        assert (mesh.kvstore.stats().blocks, len(mesh.kvstore.host.lent)) == (12, 0)
