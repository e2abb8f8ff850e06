"""What a client may ask to be kept, through the official client: how it reaches the workers, and what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import grpc
import httpx2
import pytest
from openai import BadRequestError

from penstock.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from .fakes import BLOCK, MODEL

LONG = "the quick brown fox jumps over the lazy dog. " * 4


async def ask(setup, messages: list[Any], **more: Any):
    """One answer, and what the worker was asked to keep."""
    answer = await setup.client.chat.completions.create(model=MODEL, messages=messages, **more)
    request = setup.mesh.prefills[0].requests[-1]
    return answer, request


def keys(request: common_pb2.Request) -> list[tuple[float, int]]:
    return [(wish.ttl_s, wish.blocks) for wish in request.retain]


@pytest.mark.parametrize(("said", "meant"), [("10m", 600.0), ("30s", 30.0), ("24h", 86400.0), (90, 90.0), (1.5, 1.5)])
async def test_the_whole_prompt_and_its_answer(setup, said, meant) -> None:
    _, request = await ask(setup, [{"role": "user", "content": "Hi"}], extra_body={"penstock": {"retain": said}})
    assert keys(request) == [(meant, 0)]


async def test_a_completion_too(setup) -> None:
    await setup.client.completions.create(model=MODEL, prompt="Once", extra_body={"penstock": {"retain": 60}})
    assert keys(setup.mesh.prefills[0].requests[-1]) == [(60.0, 0)]


async def test_up_to_a_message_and_up_to_a_part_of_one(setup) -> None:
    """The same prompt without marks tells where the marks have to be."""
    system: dict[str, Any] = {"role": "system", "content": LONG}
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": LONG}]
    messages = [system, {"role": "user", "content": parts}]
    _, plain = await ask(setup, messages)
    assert keys(plain) == []
    system["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    parts[0]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
    _, request = await ask(setup, messages, extra_body={"penstock": {"retain": "10s"}})
    assert list(request.prompt_ids) == list(plain.prompt_ids), "marks are no part of the prompt"
    (hour, first), (default, second), whole = keys(request)
    assert (hour, default, whole) == (3600.0, 300.0, (10.0, 0))
    texts = [setup.tokenizer.decode(request.prompt_ids[: blocks * BLOCK], False) for blocks in (first, second)]
    beyond = [setup.tokenizer.decode(request.prompt_ids[: blocks * BLOCK + BLOCK], False) for blocks in (first, second)]
    for text, further, count in zip(texts, beyond, (1, 2), strict=True):
        assert text.count(LONG.strip()[:-12]) == count
        assert text.count("lazy dog") in (4 * count - 1, 4 * count)
        assert further.count("lazy dog") >= 4 * count, "no full block was left out"


async def test_what_was_granted_is_told_whole_and_streamed(setup) -> None:
    setup.script.retained = common_pb2.Retained(seconds=42.0, blocks=3)
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    body = {"penstock": {"retain": 60}}
    answer, _ = await ask(setup, messages, extra_body=body)
    told = answer.usage.model_extra["penstock"]
    assert (told["retained_s"], told["retained_tokens"]) == (42.0, 3 * BLOCK)
    stream = await setup.client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}, extra_body=body
    )
    last = [chunk async for chunk in stream][-1].usage.model_extra["penstock"]
    assert (last["retained_s"], last["retained_tokens"]) == (42.0, 3 * BLOCK)
    setup.script.retained = None
    answer, _ = await ask(setup, messages)
    told = answer.usage.model_extra["penstock"]
    assert (told["retained_s"], told["retained_tokens"]) == (0.0, 0)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"penstock": {"retain": "5 minutes"}}, "penstock.retain", 'must be "30s", "5m"'),
        ({"penstock": {"retain": 0}}, "penstock.retain", "1 to 86400"),
        ({"penstock": {"retain": "25h"}}, "penstock.retain", "1 to 86400"),
        ({"penstock": {"retain": -1.0}}, "penstock.retain", "1 to 86400"),
        ({"penstock": {"retain": []}}, "penstock.retain", ""),
        ({"penstock": {"retian": "5m"}}, "penstock.retian", "retian"),
        ({"penstock": {"session": {"returns_in": "soon"}}}, "penstock.session.returns_in", "0 to 86400"),
        (
            {"penstock": {"session": {"returns_in": 1, "ended": True}}},
            "penstock.session.returns_in",
            "together with ended",
        ),
        ({"penstock": {"session": {"end": True}}}, "penstock.session.end", "end"),
    ],
)
async def test_what_can_not_be_is_refused_by_name(setup, body, param, said) -> None:
    with pytest.raises(BadRequestError) as caught:
        await ask(setup, [{"role": "user", "content": "Hi"}], extra_body=body)
    assert caught.value.param == param
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("control", "param", "said"),
    [
        ({"type": "ephemeral", "ttl": "1w"}, "messages[0].cache_control.ttl", "not '1w'"),
        ({"type": "persistent"}, "messages[0].cache_control.type", 'must be "ephemeral"'),
        ({}, "messages[0].cache_control.type", "is required"),
        ({"type": "ephemeral", "scope": "all"}, "messages[0].cache_control.scope", "scope"),
    ],
)
async def test_a_wrong_cache_control_is_refused_by_name(setup, control, param, said) -> None:
    with pytest.raises(BadRequestError) as caught:
        await ask(setup, [{"role": "user", "content": "Hi", "cache_control": control}])
    assert caught.value.param == param
    assert said in caught.value.message


async def test_too_many_marks_are_refused(setup) -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(BadRequestError, match="at most 4"):
        await ask(setup, [{"role": "user", "content": [part] * 5}])


MARK = {"cache_control": {"type": "ephemeral"}}
MANY = [{"type": "text", "text": "x" * 200_000}, *[{"type": "text", "text": "y", **MARK}] * 1000]
USER, SAID = {"role": "user", "content": MANY}, {"role": "assistant", "content": MANY}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/messages", {"messages": [USER]}),
        ("/v1/messages", {"messages": [SAID]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "system": MANY}),
        ("/v1/responses", {"input": [USER | {"content": [one | {"type": "input_text"} for one in MANY]}]}),
    ],
)
async def test_marks_beyond_the_bound_take_no_memory(setup, path, body) -> None:
    """Each stands for all the text before it."""
    async with httpx2.AsyncClient(base_url=setup.url, timeout=30) as http:
        tracemalloc.start()
        try:
            most = {} if "responses" in path else {"max_tokens": 5}
            answer = await http.post(path, json={"model": MODEL, **most, **body})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert answer.status_code == 400 and "at most 4" in answer.text
    assert peak < 20 << 20, "a copy of the text for each would be 200 MB"


async def test_over_grpc(setup) -> None:
    setup.script.retained = common_pb2.Retained(seconds=7.0, blocks=2)
    message = gateway_pb2.ChatMessage(role="user", content=LONG, retain_s=9.0)
    request = gateway_pb2.ChatCompletionRequest(model=MODEL, messages=[message], retain_s=60.0)
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        chunks = [chunk async for chunk in stub.ChatCompletion(request)]
        assert (chunks[-1].usage.retained_s, chunks[-1].usage.retained_tokens) == (7.0, 2 * BLOCK)
        (nine, blocks), whole = keys(setup.mesh.prefills[0].requests[-1])
        assert (nine, whole) == (9.0, (60.0, 0))
        assert blocks > 4
        request.retain_s = -1.0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ChatCompletion(request).read()
        assert "not -1" in (caught.value.details() or "")
