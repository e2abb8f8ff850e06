"""Two hosts with a store each: a session moves from one to the other and takes its KV along."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.services.kvstore.relay import relay_to

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, ask, fast_way, forget_pages, mesh_keys, on_host, prompt, settled, until

PATIENT = {"store": {"stall_s": 10.0, "bring_s": 20.0}, "worker": {"store_timeout_s": 30.0}}
"""Nobody gives up a transfer because this machine is slow."""
HASTY = {"store": {"stall_s": 0.2}}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)


@asynccontextmanager
async def two_hosts(meshes, tiny, **other):
    """A mesh on two hosts with a way between them that is fast."""
    options = MeshSetup(model=tiny, hosts=2, decode=2, router={"pull_s": 0.0}, **other)
    async with meshes(options) as mesh:
        await fast_way(mesh)
        yield mesh


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_session_that_moves_to_another_host_computes_only_what_is_new(meshes, tiny, http, oracle, sampling):
    async with two_hosts(meshes, tiny, aggregated=True) as mesh:
        tokens = prompt(f"move/{sampling.temperature}", 200)
        expected = await oracle(tokens, sampling)
        on_host(mesh, "test")
        first = await ask(http, mesh, tokens, sampling, session="s")
        assert first.ids == expected.ids
        full = [*tokens, *first.ids]
        await settled(mesh, full[: len(full) // BLOCK * BLOCK - BLOCK])
        on_host(mesh, "test-1")
        moved = await ask(http, mesh, tokens, sampling, session="s")
        assert moved.ids == expected.ids
        assert moved.usage["penstock"]["cached_tokens"]["remote"] == len(tokens) // BLOCK * BLOCK
        assert moved.computed == len(tokens) % BLOCK
        await forget_pages(mesh)
        again = await ask(http, mesh, tokens, sampling, session="s")
        assert again.ids == expected.ids
        assert again.usage["penstock"]["cached_tokens"]["host"] == len(tokens) // BLOCK * BLOCK
        assert mesh.kvstores[1].elsewhere.figures()["pulled_blocks"] == len(tokens) // BLOCK


async def test_a_hand_off_to_another_host(meshes, tiny, http, oracle):
    """Prefill on the one, decode on the other: decode's store gets the blocks from that of prefill."""
    async with two_hosts(meshes, tiny) as mesh:
        on_host(mesh, "test-1")
        for number, sampling in enumerate((GREEDY, SEEDED)):
            tokens = prompt(f"over/{number}", 150)
            answer = await ask(http, mesh, tokens, sampling)
            assert answer.ids == (await oracle(tokens, sampling)).ids
        assert mesh.kvstores[1].elsewhere.figures()["pulled_blocks"] >= 2 * (150 // BLOCK)
        assert not mesh.decode[1].metrics.handoff_faults._value.get()


@pytest.mark.parametrize("fault", ["away", "stall", "reset", "creep"])
async def test_whatever_the_way_does_the_tokens_are_right(meshes, tiny, http, oracle, fault):
    """The way to the other host's store ends, hangs, is cut or brings a byte now and then: never other tokens."""
    settings = PATIENT if fault == "reset" else HASTY
    async with two_hosts(meshes, tiny, aggregated=True, **settings) as mesh:
        near, far = mesh.kvstores
        async with relay_to(near.address) as relay:
            tokens = prompt(f"fault/{fault}", 400)
            expected = await oracle(tokens, GREEDY)
            on_host(mesh, "test")
            await ask(http, mesh, tokens, GREEDY)
            await settled(mesh, tokens[: len(tokens) // BLOCK * BLOCK])
            _reach_by(mesh, near.address, relay.address)
            if fault == "away":
                relay.target = "127.0.0.1:1"
            elif fault == "creep":
                relay.creep = True
            else:
                relay.cut = relay.stall if fault == "stall" else relay.reset
                relay.cut_at = 150_000
            on_host(mesh, "test-1")
            broken = await ask(http, mesh, tokens, GREEDY)
            assert broken.ids == expected.ids
            if fault == "away":
                assert broken.cached == 0
            if fault == "reset":
                assert broken.usage["penstock"]["cached_tokens"]["remote"] == 384, "the second attempt gets it all"
            relay.heal()
            relay.cut_at, relay.target = None, near.address
            await until(lambda: relay.address not in far.elsewhere.neighbours.shunned, "the source is tried again")
            await fast_way(mesh)  # also after what it has just been through
            other = prompt(f"after/{fault}", 100)
            on_host(mesh, "test")
            await ask(http, mesh, other, GREEDY)
            await settled(mesh, other[: len(other) // BLOCK * BLOCK])
            on_host(mesh, "test-1")
            healed = await ask(http, mesh, other, GREEDY)
            assert healed.ids == (await oracle(other, GREEDY)).ids
            assert healed.usage["penstock"]["cached_tokens"]["remote"] == len(other) // BLOCK * BLOCK
            assert mesh_keys(mesh, other)


def _reach_by(mesh, address: str, relay: str) -> None:
    """Has the mesh know a store by another address: that of a bad way to it."""
    registry = mesh.router.planner.registry
    [seat] = [seat for seat in registry if seat.member.address == address]
    seat.member = replace(seat.member, address=relay)
    mesh.kvstores[1].elsewhere.neighbours.set_joined([relay])
