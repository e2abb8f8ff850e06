"""Requests at the edges of what a mesh can do: answered or refused at once, never left hanging."""

from __future__ import annotations

import asyncio
import uuid

import grpc
import pytest

from penstock.engine.errors import EngineBusy
from penstock.engine.request import SamplingParams
from penstock.rpc.server import serve
from penstock.testing.mesh import MeshSetup
from penstock.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from .support import ask, body_of, capability, prompt, settled, until

pytestmark = pytest.mark.attack


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
    await mesh.gateway.reception.models.first._workers._channels.forget(mesh.decode[0].address)
    async with asyncio.timeout(20):
        assert (await running).ids == (await oracle(tokens, long)).ids


async def generate(mesh, tokens: list[int], handoff: str | None = None, **sampling) -> list[int]:
    """Asks the decode worker itself, as no gateway would; the ids of its tokens. `handoff` is where the prompt's KV is
    said to be."""
    values = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **sampling}
    request = common_pb2.Request(
        request_id=uuid.uuid4().hex,
        prompt_ids=tokens,
        cache_root=bytes(32),
        sampling=common_pb2.Sampling(**values),
    )
    async with grpc.aio.insecure_channel(mesh.decode[0].address) as channel:
        source = None if handoff is None else decode_pb2.HandoffSource(address=handoff)
        proof = capability(mesh.decode[0].worker, request, handoff or "")
        asked = decode_pb2.GenerateRequest(request=request, handoff=source, capability=proof)
        call = decode_pb2_grpc.DecodeStub(channel).Generate(asked)
        return [token.id async for event in call for token in event.tokens]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"])
async def test_a_worker_refuses_what_no_gateway_would_ask(mesh, oracle, http, name):
    """By name, and at no cost to those who are served: one such number makes a whole step raise, or overflow."""
    requests = [prompt(f"{name} {number}", 40) for number in range(4)]
    served = [asyncio.create_task(ask(http, mesh, tokens, PLAIN)) for tokens in requests]
    for value in (1e-300, -1e30) if name == "repetition_penalty" else (1e300, -1e30):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(mesh, prompt("attack", 20), **{name: value})
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{name} must be between" in (caught.value.details() or "")
    for tokens, task in zip(requests, served, strict=True):
        assert (await task).ids == (await oracle(tokens, PLAIN)).ids


@pytest.mark.parametrize("address", ["", "somewhere", "http://10.0.0.1:80", "127.0.0.1:0", "unix:etc/passwd"])
async def test_a_worker_connects_to_what_is_an_address(mesh, address):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(mesh, prompt("odd", 20), handoff=address)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "handoff.address" in (caught.value.details() or "")


class _Endless(prefill_pb2_grpc.PrefillServicer):
    """Hands off a part of a block that has no end."""

    sent = 0

    async def Handoff(self, request, context):
        while True:
            yield prefill_pb2.HandoffEvent(tail=bytes(1 << 20))
            self.sent += 1


async def test_a_hand_off_without_an_end_fills_no_memory(mesh, oracle):
    tokens, endless = prompt("endless", 20), _Endless()

    def register(server):
        prefill_pb2_grpc.add_PrefillServicer_to_server(endless, server)

    async with serve("127.0.0.1:0", register, []) as server:
        found = await generate(mesh, tokens, handoff=f"127.0.0.1:{server.port}", ignore_eos=True)
    assert found == (await oracle(tokens, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))).ids
    assert endless.sent < 20


async def test_a_step_that_one_request_breaks_breaks_no_other(mesh, oracle, http, monkeypatch):
    runner = mesh.decode[0].worker.engine._runner
    step, culprit = runner.step, prompt("culprit", 33)

    def breaks(runs):
        answers = step(runs)
        if any(list(run.choice.tokens[:33]) == culprit for run in runs):
            raise RuntimeError("this one")
        return answers

    monkeypatch.setattr(runner, "step", breaks)
    requests = [prompt(f"victim {number}", 50 + number) for number in range(8)]
    served = [asyncio.create_task(ask(http, mesh, tokens, PLAIN)) for tokens in requests]
    for _ in range(6):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(mesh, culprit)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    for tokens, task in zip(requests, served, strict=True):
        assert (await task).ids == (await oracle(tokens, PLAIN)).ids


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
