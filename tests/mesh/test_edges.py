"""Requests at the edges of what a mesh can do: answered or refused at once, never left hanging."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engine.errors import EngineBusy
from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import ask, body_of, prompt, settled, until

PLAIN = SamplingParams(
    max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(256, 260), -100.0)
)


@pytest.fixture(scope="module")
async def mesh(tiny, meshes):
    """A page pool of half the model's context."""
    async with meshes(MeshSetup(model=tiny, engine={"kv_pool_tokens": 1024})) as mesh:
        yield mesh


async def test_a_pool_smaller_than_the_context_bounds_the_context(mesh, http):
    body = {"model": "tiny", "prompt": prompt("default", 40), "temperature": 0, "stream": True}
    async with http.stream("POST", f"{mesh.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200
    too_long = await http.post(f"{mesh.url}/v1/completions", json=body | {"prompt": prompt("long", 1100)})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert "1024" in too_long.json()["error"]["message"]


async def test_prompts_of_several_chunks_are_published_as_they_are_computed(mesh, oracle, http):
    """More than max_batch_tokens: the store has the first blocks before the last chunk is through."""
    tokens = prompt("chunks", 900)
    answer = await ask(http, mesh, tokens, PLAIN)
    assert answer.ids == (await oracle(tokens, PLAIN)).ids
    await settled(mesh, tokens[: 900 // 16 * 16])
    again = await ask(http, mesh, tokens, PLAIN)
    assert again.ids == answer.ids
    assert again.cached == 899 // 16 * 16


async def test_a_prefill_worker_without_a_place_costs_no_wait(mesh, oracle, http, monkeypatch):
    engine = mesh.prefill[0].worker.engine

    def full(*_):
        raise EngineBusy("the line is full")

    monkeypatch.setattr(engine, "_accept", full)
    tokens = prompt("busy", 200)
    async with asyncio.timeout(5):
        answer = await ask(http, mesh, tokens, PLAIN)
    assert answer.ids == (await oracle(tokens, PLAIN)).ids
    assert answer.computed == 200


async def test_a_call_that_is_torn_down_is_planned_anew(mesh, oracle, http):
    """Closing the channel under a running call looks like a cancellation; the request goes on."""
    tokens, long = prompt("torn", 100), SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    running = asyncio.ensure_future(ask(http, mesh, tokens, long))
    engine = mesh.decode[0].worker.engine
    start = engine.stats().generated_tokens
    await until(lambda: engine.stats().generated_tokens > start + 20, "tokens flow")
    await mesh.gateway.completer._channels.forget(mesh.decode[0].address)
    async with asyncio.timeout(20):
        assert (await running).ids == (await oracle(tokens, long)).ids


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": int("9" * 400)}, "seed"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": 1e308}, "temperature"),
        ({"n": 10**20}, "n"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
async def test_absurd_numbers_name_their_field(mesh, http, change, field):
    answer = await http.post(f"{mesh.url}/v1/completions", json=body_of(prompt("absurd", 10), PLAIN) | change)
    assert answer.status_code in (400, 422)
    assert field in answer.json()["error"]["param"]


async def test_top_p_may_be_zero(mesh, oracle, http):
    tokens, zero = prompt("zero", 30), SamplingParams(max_tokens=8, temperature=1.0, top_p=0.0, seed=1, ignore_eos=True)
    assert (await ask(http, mesh, tokens, zero)).ids == (await oracle(tokens, zero)).ids


async def test_tools_nested_without_end_are_refused(mesh, http):
    schema = {}
    for _ in range(900):
        schema = {"a": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    answer = await http.post(f"{mesh.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
