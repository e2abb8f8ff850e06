"""What workers learn of their costs reaches the router, and plans follow from it."""

from __future__ import annotations

import pytest

from penstock.engine.request import SamplingParams
from penstock.router.workers import Role
from penstock.testing.mesh import MeshSetup

from .support import GivenCost, ask, prompt, until

SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def seat_of(mesh, role):
    """The router's seat of the only worker with that role."""
    [seat] = [seat for seat in mesh.router.planner.registry if seat.member.role is role]
    return seat


async def test_the_router_learns_what_hand_offs_take(meshes, tiny, http):
    async with meshes(MeshSetup(model=tiny)) as mesh:
        decode = mesh.decode[0].worker
        longest = 0.0
        for number, length in enumerate((100, 400, 150, 800, 300)):
            answer = await ask(http, mesh, prompt(f"learn/{number}", length), SAMPLING)
            longest = max(longest, answer.usage["penstock"]["times"]["handoff"])
        way = decode.handoffs.near
        assert way.bytes_per_s > 0 and not decode.handoffs.far.bytes_per_s
        size = 100 * decode.engine.spec.block_bytes / decode.engine.spec.block_size
        predicted_s = way.overhead_s + size / way.bytes_per_s
        assert predicted_s < longest, "the gateway sees more: the second token's step and the way to it"
        seat = seat_of(mesh, Role.DECODE)
        await until(
            lambda: seat.measured.handoff_rate == way.bytes_per_s and seat.measured.handoff_overhead_s > 0,
            "the router knows",
        )


async def test_the_router_learns_what_context_adds_to_a_prompt(meshes, tiny, http):
    """Of so small a model it may be nothing, as far as anybody can tell. Short prompts tell tokens from context, and
    many of them from what else the machine does."""
    async with meshes(MeshSetup(model=tiny)) as mesh:
        for number, length in enumerate((1500, 200, 400, 300, 500, 100) * 5):
            await ask(http, mesh, prompt(f"context/{number}", length), SAMPLING)
        engine, seat = mesh.prefill[0].worker.engine, seat_of(mesh, Role.PREFILL)
        token_s, context_s = engine.stats().prompt_cost
        assert token_s > 0
        await until(lambda: seat.measured.prompt_s == token_s, "the router knows")
        assert seat.measured.prompt_context_s == context_s or context_s == 0


@pytest.mark.parametrize("overhead_s", [1e-9, 100.0])
async def test_who_computes_a_prompt_follows_from_it(meshes, tiny, http, oracle, overhead_s):
    """A hand-off that takes nothing is always taken, and one that takes longer than to compute never."""
    async with meshes(MeshSetup(model=tiny, router={"local_prefill_tokens": 1 << 20})) as mesh:
        decode = mesh.decode[0].worker
        decode.handoffs.near = GivenCost(overhead_s=overhead_s, bytes_per_s=1e15)
        decode.changed.set()
        seat = seat_of(mesh, Role.DECODE)
        await until(lambda: seat.measured.handoff_overhead_s == overhead_s, "the router knows")
        for number in range(3):
            tokens = prompt(f"who/{overhead_s}/{number}", 40 + 200 * number)
            answer = await ask(http, mesh, tokens, SAMPLING)
            assert answer.ids == (await oracle(tokens, SAMPLING)).ids
        counted = mesh.prefill[0].worker.engine.stats().computed_tokens
        assert counted == (sum(40 + 200 * number for number in range(3)) if overhead_s < 1 else 0)
