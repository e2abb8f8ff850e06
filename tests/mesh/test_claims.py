"""One prefix asked of several workers at once: one computes it, and whatever becomes of that one, nobody is late."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from penstock.engine.request import SamplingParams
from penstock.kv.pace import Pace
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, ask, fast_way, held, process, prompt, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PATIENT = {"router": {"max_queue_s": 1e6}, "worker": {"store_timeout_s": 30.0, "claim_s": 0.0}}
"""Nobody is refused, and no call is given up, because workers say that they are slow."""
PULL = {"router": {"max_queue_s": 1e6, "pull_s": 0.0}, "store": {"stall_s": 10.0, "bring_s": 20.0}}
BLOCKS = 24
"""Those of a prefix, in several steps."""
STEP = {"max_batch_tokens": 8 * BLOCK, "max_running": 8}


def believe(worker, tokens_per_s: float) -> None:
    """The worker predicts with this rate, until it has computed."""
    worker.engine._counters.prefill_tokens_per_s = tokens_per_s


def only(mesh, *addresses: str) -> None:
    """Sends everything to these workers."""
    for seat in mesh.router.planner.registry:
        if seat.member.role is not None:
            seat.drain(seat.member.address not in addresses)


def prompts(name: str) -> list[list[int]]:
    """Two that begin with the same blocks."""
    common = prompt(f"{name}/common", BLOCKS * BLOCK)
    return [[*common, *prompt(f"{name}/{number}", 20 + number)] for number in range(2)]


def waits(worker, end: str) -> float:
    return worker.metrics.registry.get_sample_value("penstock_claim_waits_total", {"end": end}) or 0.0


async def test_two_workers_that_are_asked_at_once_compute_a_prefix_once(meshes, tiny, http, oracle):
    setup = MeshSetup(model=tiny, aggregated=True, decode=2, engine=STEP, **PATIENT)
    async with meshes(setup) as mesh:
        for number in range(3):
            both = prompts(f"once/{number}")
            tasks = []
            with held(mesh.decode[0].worker.engine):  # nothing is stored yet when the second one asks
                for served, tokens in zip(mesh.decode, both, strict=True):
                    believe(served.worker, 10.0)
                    only(mesh, served.address)
                    plans = len(mesh.router.planner.ledger)
                    tasks.append(asyncio.create_task(ask(http, mesh, tokens, SHORT)))
                    await until(lambda: len(mesh.router.planner.ledger) > plans, "there is a plan")  # noqa: B023
                await until(lambda: mesh.kvstore.store.claims.waiting > 0, "one of them waits")
            answers = await asyncio.gather(*tasks)
            for tokens, answer in zip(both, answers, strict=True):
                assert answer.ids == (await oracle(tokens, SHORT)).ids
            computed = sum(answer.computed for answer in answers)
            assert computed == sum(map(len, both)) - BLOCKS * BLOCK, "the prefix once"
        assert not any(waits(worker, end) for worker in mesh.workers for end in ("left", "late"))


async def test_workers_that_never_computed_a_prompt_compute_the_first_one_once(meshes, tiny, http, oracle):
    """A mesh that has just started, before anybody can predict from what was measured."""
    setup = MeshSetup(model=tiny, aggregated=True, decode=2, engine=STEP, **PATIENT)
    async with meshes(setup) as mesh:
        owner, waiter = mesh.decode
        assert owner.worker.engine.prefill_tokens_per_s == waiter.worker.engine.prefill_tokens_per_s == 0
        claims, (first, second) = mesh.kvstore.store.claims, prompts("cold")
        only(mesh, owner.address)
        with held(owner.worker.engine):
            one = asyncio.create_task(ask(http, mesh, first, SHORT))
            await until(lambda: claims.blocks == BLOCKS + 1, "the owner has claimed its blocks")
            only(mesh, waiter.address)
            other = asyncio.create_task(ask(http, mesh, second, SHORT))
            await until(lambda: claims.waiting == 1, "the other one waits")
        for tokens, task in ((first, one), (second, other)):
            assert (await task).ids == (await oracle(tokens, SHORT)).ids
        assert (await other).computed == len(second) - BLOCKS * BLOCK


@pytest.mark.parametrize("aggregated", [True, False], ids=["two workers", "prefill and decode"])
async def test_a_block_that_another_worker_computes_is_waited_for(meshes, tiny, http, oracle, aggregated):
    setup = MeshSetup(model=tiny, aggregated=aggregated, decode=2 if aggregated else 1, engine=STEP, **PATIENT)
    async with meshes(setup) as mesh:
        owner, waiter = mesh.decode if aggregated else (mesh.prefill[0], mesh.decode[0])
        claims, (first, second) = mesh.kvstore.store.claims, prompts("wait")
        believe(owner.worker, 10.0)
        believe(waiter.worker, 10.0)
        only(mesh, owner.address, *([] if aggregated else [waiter.address]))
        with held(owner.worker.engine):
            one = asyncio.create_task(ask(http, mesh, first, SHORT))
            await until(lambda: claims.blocks == BLOCKS + 1, "the owner has claimed its blocks")
            only(mesh, waiter.address)
            other = asyncio.create_task(ask(http, mesh, second, SHORT))
            await until(lambda: claims.waiting == 1, "the other one waits")
        for tokens, task in ((first, one), (second, other)):
            assert (await task).ids == (await oracle(tokens, SHORT)).ids
        extra = (await other).usage["penstock"]
        cached = extra["cached_tokens"]["host"] + extra["cached_tokens"]["worker"]
        assert cached == BLOCKS * BLOCK, "from the store, or with the hand-off that brought them here"
        assert extra["computed_tokens"] == len(second) - BLOCKS * BLOCK
        assert waits(waiter.worker, "stored") == 1
        assert waiter.worker.metrics.awaited._value.get() == BLOCKS
        await until(lambda: len(claims) == 0, "all that was claimed is stored")


async def test_a_block_that_a_worker_of_another_host_computes_is_waited_for(meshes, tiny, http, oracle):
    """The router knows where it is computed, and names the store there."""
    setup = MeshSetup(model=tiny, aggregated=True, hosts=2, decode=2, engine=STEP, **(PATIENT | PULL))
    async with meshes(setup) as mesh:
        await fast_way(mesh)
        owner, waiter = mesh.decode
        there, here = (one.store.claims for one in mesh.kvstores)
        first, second = prompts("hosts")
        believe(owner.worker, 10.0)
        believe(waiter.worker, 10.0)
        only(mesh, owner.address)
        with held(owner.worker.engine):
            one = asyncio.create_task(ask(http, mesh, first, SHORT))
            await until(lambda: there.blocks == BLOCKS + 1, "the owner has claimed its blocks")
            only(mesh, waiter.address)
            other = asyncio.create_task(ask(http, mesh, second, SHORT))
            await until(lambda: there.waiting == 1, "the other one waits")
            assert here.blocks == 0
        for tokens, task in ((first, one), (second, other)):
            assert (await task).ids == (await oracle(tokens, SHORT)).ids
        extra = (await other).usage["penstock"]
        assert extra["cached_tokens"]["remote"] == BLOCKS * BLOCK
        assert extra["computed_tokens"] == len(second) - BLOCKS * BLOCK
        assert waits(waiter.worker, "stored") == 1


async def test_a_slow_worker_is_not_waited_for_longer_than_computing_takes(meshes, tiny, http, oracle):
    setup = MeshSetup(model=tiny, aggregated=True, decode=2, engine=STEP, **PATIENT)
    async with meshes(setup) as mesh:
        owner, waiter = mesh.decode
        claims, (first, second) = mesh.kvstore.store.claims, prompts("slow")
        believe(owner.worker, 1e4)
        believe(waiter.worker, 1e3)
        only(mesh, owner.address)
        with held(owner.worker.engine):
            one = asyncio.create_task(ask(http, mesh, first, SHORT))
            await until(lambda: claims.blocks == BLOCKS + 1, "the owner has claimed its blocks")
            only(mesh, waiter.address)
            answer = await ask(http, mesh, second, SHORT)
            assert not one.done()
        assert answer.ids == (await oracle(second, SHORT)).ids
        assert answer.computed == len(second)
        assert waits(waiter.worker, "late") == 1 and waits(waiter.worker, "stored") == 0
        assert (await one).ids == (await oracle(first, SHORT)).ids


async def test_a_request_that_is_given_up_keeps_nobody_waiting(meshes, tiny, http, oracle):
    setup = MeshSetup(model=tiny, aggregated=True, decode=2, engine=STEP, **PATIENT)
    async with meshes(setup) as mesh:
        owner, waiter = mesh.decode
        claims, (first, second) = mesh.kvstore.store.claims, prompts("cancel")
        for served in mesh.decode:
            believe(served.worker, 10.0)
        only(mesh, owner.address)
        with held(owner.worker.engine):
            one = asyncio.create_task(ask(http, mesh, first, SHORT))
            await until(lambda: claims.blocks == BLOCKS + 1, "the owner has claimed its blocks")
            only(mesh, waiter.address)
            other = asyncio.create_task(ask(http, mesh, second, SHORT))
            await until(lambda: claims.waiting == 1, "the other one waits")
            one.cancel()
            answer = await other
        assert answer.ids == (await oracle(second, SHORT)).ids
        assert answer.computed == len(second)
        assert waits(waiter.worker, "left") == 1 and waits(waiter.worker, "late") == 0


async def test_kill_9_of_the_worker_that_computes(meshes, tiny, http, oracle, monkeypatch):
    """In the middle: it has claimed the blocks, and never gets to compute them. Who waits would wait for most of a
    minute; it goes on at once."""
    setup = MeshSetup(model=tiny, aggregated=True, engine=STEP, **PATIENT)
    async with meshes(setup) as mesh:
        arguments = ["--model", str(tiny), "--model-name", "tiny", "--role", "both", "--host-id", "test"]
        arguments += ["--router", mesh.router.address, "--kvstore", mesh.kvstore.address, "--claim-s", "0"]
        async with process("decode", *arguments, "--kv-pool-tokens", "8192") as (address, pid):
            store, [waiter] = mesh.kvstore.store, mesh.decode
            registry = mesh.router.planner.registry
            await until(lambda: any(seat.member.address == address for seat in registry), "the owner has joined")
            only(mesh, address)
            await ask(http, mesh, prompt("warm", 200), SHORT)  # from now on it can predict
            first, second = prompts("kill")
            make = store.claims.make

            def made(owner, number, keys, pace, **how):
                if len(keys) == BLOCKS + 1:
                    pace = Pace(queue_s=0.0, block_s=1.0)
                    os.kill(pid, signal.SIGSTOP)
                return make(owner, number, keys, pace, **how)

            monkeypatch.setattr(store.claims, "make", made)
            one = asyncio.create_task(ask(http, mesh, first, SHORT))
            await until(lambda: store.claims.blocks == BLOCKS + 1, "the owner has claimed its blocks")
            monkeypatch.undo()
            believe(waiter.worker, 10.0)
            only(mesh, waiter.address)
            other = asyncio.create_task(ask(http, mesh, second, SHORT))
            await until(lambda: store.claims.waiting == 1, "the other one waits")
            os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(one, other)
        for tokens, answer in zip((first, second), answers, strict=True):
            assert answer.ids == (await oracle(tokens, SHORT)).ids
        assert waits(waiter.worker, "left") >= 1 and waits(waiter.worker, "late") == 0, "the moved one may wait as well"
        assert sum(answer.computed for answer in answers) == len(first) + len(second) - BLOCKS * BLOCK
