"""What goes wrong in the store or the draft service never fails a request and never changes a token."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.engine.request import SamplingParams
from penstock.kv.spec import spec_to_message
from penstock.testing.mesh import MeshSetup
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc
from penstock.worker.serving.drafting import DraftClient

from .support import DRAFTING, ask, body_of, drafting, forget_pages, mesh_keys, process, prompt, settled, until

NO_SPECIALS = dict.fromkeys(range(256, 260), -100.0)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias=NO_SPECIALS)
LONG = replace(GREEDY, max_tokens=400)


@pytest.fixture(scope="module")
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny)) as mesh:
        yield mesh


def flip(blocks):
    blocks[3][100] ^= 1


def swap(blocks):
    blocks[2][:], blocks[5][:] = bytes(blocks[5]), bytes(blocks[2])


def truncate(blocks):
    half = len(blocks[1]) // 2
    blocks[1][half:] = bytes(len(blocks[1]) - half)


@pytest.mark.parametrize(("damage", "good"), [(flip, 3), (swap, 2), (truncate, 1)])
async def test_a_damaged_block_is_refused_recomputed_and_counted(mesh, oracle, http, damage, good):
    tokens = prompt(damage.__name__, 170)
    expected = await oracle(tokens, GREEDY)
    assert (await ask(http, mesh, tokens, GREEDY)).ids == expected.ids
    await settled(mesh, tokens)
    before = mesh.kvstore.stats().quarantined
    async with leased(mesh, tokens) as blocks:
        damage(blocks)
    await forget_pages(mesh)
    again = await ask(http, mesh, tokens, GREEDY)
    assert again.ids == expected.ids
    assert again.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert again.cached == good * 16
    assert mesh.kvstore.stats().quarantined > before


@asynccontextmanager
async def leased(mesh, tokens):
    """Writable views of the stored blocks of `tokens`, straight from the arena."""
    import mmap

    stub = kvstore_pb2_grpc.KvStoreStub(mesh.workers[0].channels.to(mesh.kvstore.address, "store"))
    spec = mesh.workers[0].engine.spec
    attach = kvstore_pb2.AttachRequest(client="test")
    attach.spec.CopyFrom(spec_to_message(spec))
    call = stub.Attach(attach)
    first = await call.read()
    answer = await stub.Lease(
        kvstore_pb2.LeaseRequest(attachment_id=first.attachment_id, keys=mesh_keys(mesh, tokens), lease_s=5)
    )
    with open(first.arena_path, "r+b") as file:
        arena = mmap.mmap(file.fileno(), first.arena_bytes)
    view = memoryview(arena)
    blocks = [view[offset : offset + answer.length] for offset in answer.offsets]
    yield blocks
    for block in blocks:
        block.release()
    view.release()
    arena.close()
    call.cancel()


async def stores_are(mesh, *, away):
    """Returns when the router has heard whether the workers have their stores."""
    seats = [seat for seat in mesh.router.planner.registry if seat.member.role is not None]
    what = f"all stores are {'away' if away else 'there'}"
    await until(lambda: all(seat.report.store_away is away for seat in seats), what, seconds=30)


async def computed(mesh, oracle, http, name):
    """Rows that prefill and decode worker compute for a new prompt of 300 tokens and its short answer."""
    tokens, engines = prompt(name, 300), [worker.engine for worker in mesh.workers]
    before = [engine.stats().computed_tokens for engine in engines]
    assert (await ask(http, mesh, tokens, GREEDY)).ids == (await oracle(tokens, GREEDY)).ids
    return [engine.stats().computed_tokens - rows for engine, rows in zip(engines, before, strict=True)]


async def test_without_a_store_a_prompt_is_computed_once(tiny, meshes, oracle, http):
    """Also where a router would have prefill workers compute all prompts: a hand-off would move nothing."""
    async with meshes(MeshSetup(model=tiny, kvstore=False, router={"local_prefill_tokens": 0})) as mesh:
        await stores_are(mesh, away=True)
        for number in range(2):
            prefill, decode = await computed(mesh, oracle, http, f"once/{number}")
            assert prefill == 0 and decode >= 300


async def test_while_a_store_is_dead_a_prompt_is_computed_once(tiny, meshes, oracle, http):
    """There are hand-offs before that, and again when the store is back."""
    arguments = ("--host-bytes", "64MiB", "--host-id", "test")
    async with process("kvstore", *arguments) as (address, pid):
        async with meshes(MeshSetup(model=tiny, kvstore=address, worker={"store_timeout_s": 30.0})) as mesh:
            await stores_are(mesh, away=False)
            prefill, decode = await computed(mesh, oracle, http, "before")
            assert prefill == 300 > decode
            os.kill(pid, signal.SIGKILL)
            await stores_are(mesh, away=True)
            prefill, decode = await computed(mesh, oracle, http, "dead")
            assert prefill == 0 and decode >= 300
            async with process("kvstore", *arguments, "--address", address):
                await stores_are(mesh, away=False)
                prefill, decode = await computed(mesh, oracle, http, "back")
                assert prefill == 300 > decode


async def test_without_a_store_everything_is_computed(tiny, meshes, oracle, http):
    async with meshes(MeshSetup(model=tiny, kvstore=False)) as mesh:
        await stores_are(mesh, away=True)
        tokens = prompt("no store", 100)
        for _ in range(2):
            await forget_pages(mesh)
            answer = await ask(http, mesh, tokens, GREEDY)
            assert answer.ids == (await oracle(tokens, GREEDY)).ids
            assert answer.cached == 0
        again = await ask(http, mesh, tokens, GREEDY)
        assert again.ids == answer.ids
        assert again.usage["penstock"]["cached_tokens"]["worker"] == again.cached == 96, "but for its own pages"


@pytest.mark.parametrize("victim", ["kvstore", "draft"])
async def test_kill_9_under_load(victim, tiny, meshes, oracle, http):
    """Four long generations run; the victim dies in their middle; all end with the oracle's tokens."""
    arguments = {"kvstore": ["--host-bytes", "64MiB", "--host-id", "test"], "draft": ["--model", str(tiny)]}[victim]
    async with process(victim, *arguments) as (address, pid):
        options = MeshSetup(
            model=tiny,
            kvstore=address if victim == "kvstore" else True,
            draft=f"address:{address}" if victim == "draft" else "none",
            engine={"draft_always": True, "lookup_tokens": 0},
        )
        async with meshes(options) as mesh:
            prompts = [prompt(f"{victim}/{number}", 120 + number) for number in range(4)]
            await ask(http, mesh, prompts[0], GREEDY)
            if victim == "draft":
                await drafting(http, mesh)
            running = asyncio.gather(*(ask(http, mesh, tokens, LONG) for tokens in prompts))
            decode = mesh.decode[0].worker.engine
            start = decode.stats().generated_tokens
            await until(lambda: decode.stats().generated_tokens > start + 100, "the load runs")
            assert victim != "draft" or decode.stats().accepted > 10, "with drafts"
            os.kill(pid, signal.SIGKILL)
            answers = await running
            assert decode.stats().generated_tokens >= start + 4 * 399
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer.ids == (await oracle(tokens, LONG)).ids
            after = await ask(http, mesh, prompts[1], GREEDY)
            assert after.ids == (await oracle(prompts[1], GREEDY)).ids


async def test_a_draft_service_that_hangs_costs_a_few_waits(tiny, meshes, oracle, http):
    """A stopped process keeps its connections. Nobody waits for what it owes, but for a moment; when it goes on, there
    are drafts again."""
    async with process("draft", "--model", str(tiny)) as (address, pid):
        engine = {"draft_always": True, "lookup_tokens": 0}
        async with meshes(MeshSetup(model=tiny, draft=f"address:{address}", engine=engine)) as mesh:
            decode = mesh.decode[0].worker.engine
            await drafting(http, mesh)
            prompts = [prompt(f"hang/{number}", 60 + number) for number in range(4)]
            running = asyncio.gather(*(ask(http, mesh, tokens, LONG) for tokens in prompts))
            start = decode.stats()
            await until(lambda: decode.stats().accepted > start.accepted + 50, "the load runs, with drafts")
            os.kill(pid, signal.SIGSTOP)
            try:
                before = decode.stats()
                answers = await running
                answers += await asyncio.gather(*(ask(http, mesh, tokens, LONG) for tokens in prompts))
                stopped = decode.stats()
            finally:
                os.kill(pid, signal.SIGCONT)
            assert stopped.draft_failures - before.draft_failures < 40 < stopped.steps - before.steps
            for tokens, answer in zip([*prompts, *prompts], answers, strict=True):
                assert answer.ids == (await oracle(tokens, LONG)).ids
            await drafting(http, mesh)


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_a_worker_that_hangs_costs_seconds(victim, tiny, meshes, oracle, http):
    """A stopped process keeps its connections. The router hears nothing of it, and the gateway ends the calls to it."""
    longer = replace(LONG, max_tokens=1700)  # so that it is stopped well before their end
    async with meshes(MeshSetup(model=tiny)) as mesh:
        store = ["--kvstore", mesh.kvstore.address, "--host-id", "test"]
        served = ["--router", mesh.router.address, "--model", str(tiny), "--model-name", "tiny"]
        async with process(victim, *store, *served) as (address, pid):
            seats = [seat for seat in mesh.router.planner.registry if seat.member.role]
            [hangs] = [seat for seat in seats if seat.member.address == address]
            [healthy] = [seat for seat in seats if seat.member.role == hangs.member.role and seat is not hangs]
            healthy.drain()
            prompts = [prompt(f"hangs/{victim}/{number}", 200 + number) for number in range(4)]
            if victim == "prefill":
                os.kill(pid, signal.SIGSTOP)
            running = asyncio.gather(*(ask(http, mesh, tokens, longer) for tokens in prompts))
            if victim == "prefill":
                await until(lambda: len(mesh.router.planner.ledger) == 4, "all have a plan")
            else:
                await until(lambda: hangs.report.running == 4, "the load runs")
                os.kill(pid, signal.SIGSTOP)
            healthy.drain(False)
            others = mesh.decode[0].worker.engine
            before = others.stats().generated_tokens
            # less than it takes until the connection is given up
            await until(lambda: others.stats().generated_tokens > before, "others serve them", seconds=13)
            answers = await running
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer.ids == (await oracle(tokens, longer)).ids
            assert mesh.gateway.metrics.registry.get_sample_value("penstock_replans_total", {"model_name": "tiny"}) >= 4


async def test_a_defect_of_the_draft_client_costs_drafts_and_is_mended_by_starting_again(
    tiny, other, meshes, oracle, http, monkeypatch
):
    tokens = prompt("defect", 60)
    take, seen = DraftClient._take, []

    def defect(client, leads):
        seen.append(leads)
        if len(seen) == 3:
            raise ZeroDivisionError("a defect of the draft client")
        take(client, leads)

    async with meshes(MeshSetup(model=tiny, draft=str(other), aggregated=True, engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        monkeypatch.setattr(DraftClient, "_take", defect)
        assert (await ask(http, mesh, tokens, LONG)).ids == (await oracle(tokens, LONG)).ids
        assert len(seen) >= 3
        seen += [None] * 3
        await drafting(http, mesh)
        text = mesh.decode[0].metrics.text().decode()
        assert 'penstock_task_failures_total{task="draft client"} 1.0' in text


STAGES = ("at once", "first chunk", "middle")


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_hangs_up_frees_everything(mesh, http, stage):
    """Pages, leases, reservations, charges and sequences return to what they were."""
    before = baseline(mesh)
    body = body_of(prompt(stage, 400), LONG) | {"stream": True}
    task = asyncio.ensure_future(read_until(http, mesh, body, {"first chunk": 1, "middle": 50}.get(stage, 10**9)))
    if stage == "at once":
        await until(lambda: sum(w.engine.stats().running for w in mesh.workers) > 0, "a worker has begun", 5)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: baseline(mesh) == before, f"{before} again", 1.0)


@pytest.mark.parametrize("stage", ["fetch", "hand-off"])
async def test_a_client_that_hangs_up_while_a_worker_waits(mesh, http, monkeypatch, stage):
    """The store does not answer, or the prefill does not end: the client's leaving ends the wait."""
    before = baseline(mesh)
    reached = asyncio.Event()

    async def endless(*_, **__):
        reached.set()
        await asyncio.Event().wait()
        yield

    if stage == "fetch":
        monkeypatch.setattr(mesh.prefill[0].worker.store, "lease", asynccontextmanager(endless))
    else:
        monkeypatch.setattr(mesh.prefill[0].worker.engine, "generate", endless)
    task = asyncio.ensure_future(ask(http, mesh, prompt(f"waits/{stage}", 300), GREEDY))
    await reached.wait()
    decode = mesh.decode[0].worker.engine
    await until(lambda: decode.stats().loading == 1, "decode follows the hand-off")
    task.cancel()
    await until(lambda: baseline(mesh) == before, f"{before} again", 1.0)


async def read_until(http, mesh, body, events):
    """Reads that many SSE events, then hangs up."""
    async with http.stream("POST", f"{mesh.url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            events -= line.startswith("data:")
            if events <= 0:
                return


def baseline(mesh):
    """Everything that is lent out."""
    workers = [worker.engine.stats() for worker in mesh.workers]
    store = mesh.kvstore.stats()
    return {
        "pages": [stats.total_pages - stats.free_pages for stats in workers],
        "sequences": [stats.running + stats.waiting + stats.loading for stats in workers],
        "leases": store.leases,
        "reserved": store.reserved,
        "charges": len(mesh.router.planner.ledger),
    }
