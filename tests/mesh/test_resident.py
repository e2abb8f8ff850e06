"""What workers have in their own pages: who gets a request, what the router expects, and what nobody counts twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from penstock.engine.request import SamplingParams
from penstock.router.bias import Bias
from penstock.testing.mesh import MeshSetup
from penstock.worker import rotation

from .support import BLOCK, body_of, held, in_pages, mesh_keys, prompt, settled, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = replace(SHORT, max_tokens=64)
SLOW = {"prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01, "fetch_bytes_per_s": 1e9}
"""What the router hears of every worker's speed, whatever it is on this machine."""


@pytest.fixture
def equal(monkeypatch):
    """All workers say that they are equally slow, and are believed; returns when the router has heard it."""
    load = rotation.load

    def slow(worker):
        report = load(worker)
        report.ClearField("step")
        report.ClearField("prompt")
        for field, value in SLOW.items():
            setattr(report, field, value)
        report.handoff.overhead_s, report.handoff.bytes_per_s = 0.1, 1e9
        return report

    async def heard(mesh):
        seats = [seat for seat in mesh.router.planner.registry if seat.member.role is not None]
        await until(lambda: all(seat.measured.fetch_rate == 1e9 for seat in seats), "the router thinks they are slow")

    monkeypatch.setattr(rotation, "load", slow)
    monkeypatch.setattr(Bias, "learn", lambda *_: None)  # else who has served is believed to be quicker than it says
    return heard


async def told(http, mesh, tokens, sampling=SHORT):
    """A completion: its tokens, its usage, and the one plan that the router made for it."""
    answer = await http.post(f"{mesh.url}/v1/completions", json=body_of(tokens, sampling))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    record = (await http.get(f"{mesh.url}/v1/requests/{found['id']}")).json()
    [attempt] = record["choices"][0]["attempts"]
    extra = found["usage"]["penstock"]
    assert sum(extra["cached_tokens"].values()) + extra["computed_tokens"] == len(tokens)
    return found["choices"][0]["token_ids"], extra, attempt


async def known(mesh, workers, tokens):
    """Returns when the router knows what each of the workers has in its pages."""
    index = mesh.router.planner.index
    by_address = {seat.member.address: seat.member.id for seat in mesh.router.planner.registry}

    def same(served) -> bool:
        keys = list(served.worker.engine.pool.keys())
        return all(by_address[served.address] in index.match([key]) for key in keys)

    await until(lambda: all(map(same, workers)), "the router knows the workers' pages")


@pytest.mark.parametrize("kvstore", [True, False], ids=["store", "no store"])
async def test_the_next_turn_goes_to_the_worker_that_has_the_pages(meshes, tiny, http, oracle, equal, kvstore):
    """Nothing else leads there: the client names no session, and a store gives the blocks to both workers."""
    async with meshes(MeshSetup(model=tiny, aggregated=True, decode=2, kvstore=kvstore)) as mesh:
        await equal(mesh)
        places: set[str] = set()
        for number in range(64):  # the router draws between equals: some time both have been drawn
            if number >= 8 and len(places) == 2:
                break
            tokens = prompt(f"turn/{number}", 12 * BLOCK + 3)
            ids, _, first = await told(http, mesh, tokens)
            full = [*tokens, *ids]
            blocks = (len(full) - 1) // BLOCK * BLOCK
            if kvstore:
                await settled(mesh, full[:blocks])
            await known(mesh, mesh.decode, tokens)
            again = [*full, *prompt(f"more/{number}", 100)]
            ids, extra, second = await told(http, mesh, again)
            assert ids == (await oracle(again, SHORT)).ids
            assert second["decode"]["worker"] == first["decode"]["worker"]
            assert second["reasons"]["resident_tokens"] == blocks
            assert second["reasons"]["uncached_tokens"] == len(again) - blocks
            assert extra["cached_tokens"]["worker"] == in_pages(len(full) - 1) > blocks, "with the tail"
            assert extra["computed_tokens"] == len(again) - in_pages(len(full) - 1)
            places.add(first["decode"]["worker"])
        assert len(places) == 2, "both workers have something"


async def test_prefill_and_decode_are_chosen_for_their_pages(meshes, tiny, http, oracle, equal):
    """A prefill worker has the prompt of the turn before, a decode worker the answer too: long turns go to both, short
    ones to the second alone."""
    async with meshes(MeshSetup(model=tiny, prefill=2, decode=2)) as mesh:
        await equal(mesh)
        for number in range(6):
            tokens = prompt(f"turn/{number}", 12 * BLOCK + 3)
            ids, _, first = await told(http, mesh, tokens, replace(SHORT, max_tokens=2 * BLOCK))
            full = [*tokens, *ids]
            blocks = (len(full) - 1) // BLOCK * BLOCK
            await settled(mesh, full[:blocks])
            await known(mesh, [*mesh.prefill, *mesh.decode], tokens)
            long, short = ([*full, *prompt(f"more/{number}", more)] for more in (200, 20))
            ids, extra, second = await told(http, mesh, long)
            assert ids == (await oracle(long, SHORT)).ids
            assert second["prefill"]["worker"] == first["prefill"]["worker"]
            assert second["decode"]["worker"] == first["decode"]["worker"]
            assert second["reasons"]["resident_tokens"] == extra["cached_tokens"]["worker"] == 12 * BLOCK
            assert extra["cached_tokens"]["host"] == blocks - 12 * BLOCK, "the answer's blocks come from the store"
            await known(mesh, [*mesh.prefill, *mesh.decode], tokens)
            ids, extra, third = await told(http, mesh, short)
            assert ids == (await oracle(short, SHORT)).ids
            assert (third["prefill"], third["decode"]["worker"]) == (None, first["decode"]["worker"])
            assert third["reasons"]["resident_tokens"] == (len(short) - 1) // BLOCK * BLOCK > blocks
            assert extra["cached_tokens"]["worker"] == in_pages(len(short) - 1), "the long one begins with it"


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
async def test_sessions_with_a_common_beginning_are_not_refused(meshes, tiny, http, oracle, equal, aggregated):
    """Each by itself would wait longer than any may: together they compute the beginning once, and that is expected."""
    common = prompt("system", 70 * BLOCK)
    prompts = [common + prompt(f"own/{number}", 20 + number) for number in range(9)]
    setup = MeshSetup(model=tiny, aggregated=aggregated, router={"max_queue_s": 2.0})
    async with meshes(setup) as mesh, asyncio.TaskGroup() as tasks:
        await equal(mesh)
        computes = (mesh.prefill or mesh.decode)[0]
        [seat] = [one for one in mesh.router.planner.registry if one.member.address == computes.address]
        with held(computes.worker.engine):
            asked = [tasks.create_task(told(http, mesh, tokens, LONG)) for tokens in prompts[:8]]
            await until(lambda: seat.report.running + seat.report.waiting == 8, "the worker has reported all eight")
            asked.append(tasks.create_task(told(http, mesh, prompts[8], LONG)))
            await until(lambda: len(mesh.router.planner.ledger) == 9, "there is a plan for the ninth")
        answers = await asyncio.gather(*asked)
        for tokens, (ids, _, _) in zip(prompts, answers, strict=True):
            assert ids == (await oracle(tokens, LONG)).ids
        expected = [attempt["reasons"]["uncached_tokens"] for _, _, attempt in answers]
        own = [len(tokens) - len(common) for tokens in prompts]
        assert sum(expected) == sum(own) + len(common), "the router expected the beginning to be computed once"
        assert sum(extra["computed_tokens"] for _, extra, _ in answers) == sum(own) + len(common), "so it was"


@pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])
async def test_the_store_keeps_what_is_hot_in_workers(meshes, tiny, http, oracle, aggregated):
    """A prompt that is longer than what may wait to be published, used again and again from pages alone, while others
    fill the store several times: a store that goes by use alone never lets a block of it go."""
    hot = prompt("hot", 105 * BLOCK)
    setup = MeshSetup(
        model=tiny,
        aggregated=aggregated,
        engine={"kv_pool_tokens": 400 * BLOCK, "max_batch_tokens": 64},
        kv_host_bytes=200 * 12_400,
        store={"eviction": "lru"},
        worker={"lend": False},
    )
    async with meshes(setup) as mesh:
        table, keys = mesh.kvstore.host.table, mesh_keys(mesh, hot)
        ids, _, _ = await told(http, mesh, hot)
        await settled(mesh, hot)

        def used_since(tick: int) -> bool:
            return table.find(keys[-2]).used > tick

        workers = [served.metrics for served in (*mesh.prefill, *mesh.decode)]
        published = [metrics.published._value.get() for metrics in workers]
        touched = sum(metrics.touched._value.get() for metrics in workers)
        for number in range(12):
            before = table.find(keys[-2]).used
            again, extra, _ = await told(http, mesh, hot)
            assert again == ids == (await oracle(hot, SHORT)).ids
            assert extra["cached_tokens"]["worker"] == len(hot) - 1
            await until(partial(used_since, before), "the store has heard of it")
            other = prompt(f"other/{number}", 30 * BLOCK)
            await told(http, mesh, other)
            await settled(mesh, other)
            assert table.lookup(keys) >= 104
        assert mesh.kvstore.stats().evictions > 200, "others were evicted"
        uses = sum(metrics.touched._value.get() for metrics in workers) - touched
        assert 11 * 104 <= uses <= 12 * 105, "the last message may be on its way"
        stored = sum(metrics.published._value.get() for metrics in workers) - sum(published)
        assert stored <= 12 * 31, "no block of it was stored again"
        faults = [one.registry.get_sample_value("penstock_store_faults_total", {"what": "publish"}) for one in workers]
        assert not any(faults)


async def test_what_the_store_has_lost_is_published_again(meshes, tiny, http):
    """At the first use from pages the worker hears that it is gone, at the second it stores it again."""
    setup = MeshSetup(model=tiny, aggregated=True, kv_host_bytes=100 * 12_400, worker={"lend": False})
    async with meshes(setup) as mesh:
        store, tokens = mesh.kvstore, prompt("lost", 20 * BLOCK)
        await told(http, mesh, tokens)
        await settled(mesh, tokens)
        number = 0
        while store.host.table.lookup(mesh_keys(mesh, tokens)):
            number += 1
            other = prompt(f"other/{number}", 50 * BLOCK)
            await told(http, mesh, other)
            await settled(mesh, other)
        touches = store.store.touch
        heard = []

        def touch(*asked):
            heard.append(touches(*asked))
            return heard[-1]

        store.store.touch = touch
        await told(http, mesh, tokens)
        await until(lambda: heard, "the store is told of uses")
        assert heard[0] == mesh_keys(mesh, tokens)[:19]
        _, extra, _ = await told(http, mesh, tokens)
        assert extra["cached_tokens"]["worker"] == len(tokens) - 1
        await settled(mesh, tokens)
