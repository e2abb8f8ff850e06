"""A call of the gRPC API that has broken off is gone on with at another gateway: each text once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

from . import fakes

Chunk = gateway_pb2.ChatCompletionChunk | gateway_pb2.CompletionChunk
CALLS = (
    'The <think>brown</think> fox. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '\n<tool_call>{"name": "get_weather", "arguments": {"city": "Bergen"}}</tool_call>'
)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
HI = {"model": fakes.MODEL, "messages": [{"role": "user", "content": "hi"}]}
RAW = {"model": fakes.MODEL, "prompts": ["hi"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("The quick brown fox.", HI),
    "reasoning": ("<think>the fox is brown</think>The quick brown fox.", HI),
    "calls": (CALLS, HI | {"tools": [{"name": "get_weather", "parameters": '{"type": "object"}'}]}),
    "structured": ('{"name": "Oslo"}', HI | {"constraint": {"json_schema": SCHEMA}}),
    "several": ("The quick brown fox.", HI | {"n": 2, "logprobs": True}),
    "a stop string": ("The quick brown fox", HI | {"stop": ["fox jumps"]}),
    "a part": ("The quick brown fox.", HI | {"max_completion_tokens": 4}),
    "raw": ("The quick brown fox.", RAW | {"return_token_ids": True}),
    "raw prompts": ("The quick brown fox.", RAW | {"prompts": ["hi", "ho"], "n": 2}),
}


@pytest.fixture
async def stubs(setup, model_dir):
    """Of two gateways before the same mesh."""
    own = {"http_address": "127.0.0.1:0", "grpc_address": "127.0.0.1:0", "drain_s": 0.2}
    async with open_gateway(GatewayConfig(router=setup.mesh.address, model_dir=model_dir, **own)) as other:
        await other.ready()
        addresses = (setup.gateway.grpc_address, other.grpc_address)
        async with grpc.aio.insecure_channel(addresses[0]) as one, grpc.aio.insecure_channel(addresses[1]) as two:
            yield gateway_pb2_grpc.GatewayStub(one), gateway_pb2_grpc.GatewayStub(two)


def call(stub: gateway_pb2_grpc.GatewayStub, fields: dict[str, Any], last: str = "", key: str | None = "k-1"):
    """A call, under a name of its own."""
    metadata = [("idempotency-key", key)] if key is not None else []
    metadata += [("last-event-id", last)] if last else []
    if "prompts" in fields:
        return stub.Completion(gateway_pb2.CompletionRequest(**fields), metadata=metadata)
    return stub.ChatCompletion(gateway_pb2.ChatCompletionRequest(**fields), metadata=metadata)


def told(chunks: Sequence[Chunk]) -> dict[int, dict[Any, Any]]:
    """What was said of each choice, in order, whatever the pieces were; with its end, as often as it was told."""
    found: dict[int, dict[Any, Any]] = {}
    for chunk in chunks:
        if chunk.HasField("usage"):
            continue
        pieces: list[tuple[Any, Any]] = [("finish", [chunk.finish_reason])] if chunk.finish_reason else []
        pieces += [("logprobs", [(one.utf8, one.logprob) for one in chunk.logprobs])]
        if isinstance(chunk, gateway_pb2.CompletionChunk):
            pieces += [("text", chunk.text), ("ids", [*chunk.token_ids])]
        else:
            pieces += [("text", chunk.content), ("reasoning", chunk.reasoning_content)]
            pieces += [((one.index, "call"), one.id + one.name + one.arguments) for one in chunk.tool_calls]
        mine = found.setdefault(chunk.choice, {})
        for name, value in pieces:
            if value:
                mine[name] = mine[name] + value if name in mine else value
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_wherever_a_call_breaks_off_the_rest_follows(setup, stubs, kind):
    text, fields = KINDS[kind]
    setup.says(text)
    whole = [chunk async for chunk in call(stubs[0], fields)]
    ids = [chunk.event_id for chunk in whole]
    assert len(ids) == len(set(ids)) >= 3 and all(ids[:-1]) and not ids[-1] and whole[-1].HasField("usage")
    for place, last in enumerate(ids[:-1]):
        rest = [chunk async for chunk in call(stubs[1], fields, last)]
        assert {chunk.id for chunk in rest} == {whole[0].id} and rest[-1].HasField("usage")
        assert told(whole[: place + 1] + rest) == told(whole), f"after {last}"
        assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
    assert [chunk.HasField("usage") for chunk in rest] == [True], "nothing is told twice"


async def test_a_key_stands_for_the_seed_and_the_ids(setup, stubs):
    setup.script.say = lambda request: setup.ids(f"seed {request.sampling.seed}")

    async def answer(number: int, key: str | None) -> tuple[str, str]:
        chunks = [chunk async for chunk in call(stubs[number], HI, key=key)]
        return chunks[0].id, "".join(chunk.content for chunk in chunks)

    named = await answer(0, "k-1")
    assert named == await answer(1, "k-1")
    others = [await answer(0, None), await answer(0, None), await answer(1, "k-2")]
    assert len({named, *others}) == 4


async def test_without_a_key_chunks_have_no_ids(setup, stubs):
    assert not any([chunk.event_id async for chunk in call(stubs[0], HI, key=None)])


@pytest.mark.parametrize("fields", [HI, RAW], ids=["chat", "raw"])
async def test_what_is_no_place_of_the_answer_is_refused_by_name(setup, stubs, fields):
    *_, end, _ = [chunk.event_id async for chunk in call(stubs[0], fields)]
    tag, _, count = end.partition("-")
    no_place = [(f"{tag}-{int(count) + 1}", fields, "k-1"), (f"{tag}-1.1", fields, "k-1")]
    other_request = [(end, fields | {"temperature": 0.5}, "k-1"), (end, fields, "k-2")]
    for last, asked, key in no_place + other_request:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert not [chunk async for chunk in call(stubs[1], asked, last, key)]
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        said = caught.value.details() or ""
        assert said.startswith(f"last-event-id = {last!r}: ") and said.endswith("of this request's stream, or none")
    wrong = (
        ("17", "k-1", "last-event-id = '17': must be"),
        (end, None, "last-event-id = "),
        ("", "", "idempotency-key"),
    )
    for last, key, said in wrong:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert not [chunk async for chunk in call(stubs[1], fields, last, key)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(said)
