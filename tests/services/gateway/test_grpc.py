"""The gRPC door says what the HTTP door says."""

from __future__ import annotations

import asyncio
import time

import grpc
import httpx2
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.errors import Unavailable
from penstock.rpc.errors import from_rpc
from penstock.testing.keys import key_file
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


CALLED = gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.FunctionCall(id="1", name="f")])


PICTURE = "data:image/png;base64,AAAA"
"""The model of these tests sees none."""


def told(role="user", **fields) -> gateway_pb2.ChatMessage:
    return gateway_pb2.ChatMessage(role=role, **fields)


@pytest.fixture
async def stub(setup):
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        yield gateway_pb2_grpc.GatewayStub(channel)


def request(**fields) -> gateway_pb2.ChatCompletionRequest:
    fields = {"messages": [gateway_pb2.ChatMessage(role="user", content="hi")], **fields}
    return gateway_pb2.ChatCompletionRequest(model="tiny", **fields)


async def collect(call) -> tuple[dict, gateway_pb2.Usage]:
    choices: dict[int, dict] = {}
    last = None
    async for chunk in call:
        assert last is None or not last.HasField("usage")
        last = chunk
        if chunk.HasField("usage"):
            continue
        fresh = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "finish": ""}
        found = choices.setdefault(chunk.choice, fresh)
        found["content"] += chunk.content
        found["reasoning"] += chunk.reasoning_content
        found["finish"] += chunk.finish_reason
        found["logprobs"] += [(entry.utf8, round(entry.logprob, 4), len(entry.top)) for entry in chunk.logprobs]
        for call_delta in chunk.tool_calls:
            if call_delta.id:
                assert call_delta.index == len(found["calls"])
                found["calls"].append([call_delta.name, ""])
            found["calls"][call_delta.index][1] += call_delta.arguments
    return choices, last.usage


async def test_same_as_http(setup, stub):
    setup.says("<think>hm</think>Wait.\n" + CALL)
    setup.script.cached = {"host": 4}
    tool = gateway_pb2.FunctionTool(
        name="get_weather", description="W", parameters='{"type": "object", "properties": {"city": {"type": "string"}}}'
    )
    choices, usage = await collect(
        stub.ChatCompletion(request(tools=[tool], n=2, seed=7, logprobs=True, top_logprobs=1, top_k=9, temperature=0.5))
    )
    by_grpc = setup.mesh.decodes[0].requests[-1]
    function = {"name": "get_weather", "description": "W", "parameters": SCHEMA}
    answer = await setup.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": function}],
        n=2,
        seed=7,
        logprobs=True,
        top_logprobs=1,
        temperature=0.5,
        extra_body={"top_k": 9},
    )
    by_http = setup.mesh.decodes[0].requests[-1]
    assert (list(by_grpc.prompt_ids), by_grpc.cache_root) == (list(by_http.prompt_ids), by_http.cache_root)
    seeds = {7, 8}
    assert {by_grpc.sampling.seed, by_http.sampling.seed} <= seeds
    for found in (by_grpc.sampling, by_http.sampling):
        found.ClearField("seed")
    assert MessageToDict(by_grpc.sampling) == MessageToDict(by_http.sampling)
    for choice in answer.choices:
        mine = choices[choice.index]
        assert mine["content"] == choice.message.content
        assert mine["reasoning"] == choice.message.reasoning_content
        assert mine["calls"] == [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert mine["finish"] == choice.finish_reason == "tool_calls"
        theirs = [(bytes(entry.bytes), entry.logprob, len(entry.top_logprobs)) for entry in choice.logprobs.content]
        assert mine["logprobs"] == theirs
    assert usage.prompt_tokens == answer.usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens
    assert usage.completion_tokens == answer.usage.completion_tokens
    assert (usage.cached_tokens, usage.cached_host) == (4, 4)
    assert usage.reasoning_tokens == answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert usage.seed == answer.usage.model_dump()["penstock"]["seed"] == 7
    assert set(usage.seconds) == set(answer.usage.model_dump()["penstock"]["times"])


async def test_several_turns(setup, stub):
    messages = [
        gateway_pb2.ChatMessage(role="developer", content="D"),
        gateway_pb2.ChatMessage(role="user", content="hi"),
        gateway_pb2.ChatMessage(
            role="assistant", tool_calls=[gateway_pb2.FunctionCall(id="1", name="f", arguments='{"a":1}')]
        ),
        gateway_pb2.ChatMessage(role="tool", content="2", tool_call_id="1"),
    ]
    await collect(stub.ChatCompletion(request(messages=messages)))
    ids = list(setup.mesh.prefills[0].requests[-1].prompt_ids)
    text = setup.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nD<|im_end|>")
    assert '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>' in text


async def test_parts_of_a_message_are_its_text(setup, stub):
    for fields in ({"content": "one two"}, {"parts": [{"text": "one "}, {"text": "two"}]}):
        await collect(stub.ChatCompletion(request(messages=[told(**fields)])))
    first, second = (list(one.prompt_ids) for one in setup.mesh.prefills[0].requests[-2:])
    assert first == second


LONG = "the quick brown fox jumps over the lazy dog " * 400
TURNS = [
    {"role": role, "content": f"{role} {at}: " + "the quick brown fox " * 10}
    for at in range(40)
    for role in ("user", "assistant")
] + [{"role": "user", "content": "the last"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 7},
        {"truncate_prompt_tokens": -1, "max_completion_tokens": 100},
        {"truncate_prompt_tokens": 7, "messages": [{"role": "user", "content": LONG}]},
        {"continue_final_message": True, "messages": [{"role": "assistant", "content": "Well, "}]},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "reasoning_effort": "high"},
        {"bad_words": ["fox", " dog"]},
    ],
)
async def test_the_fields_of_other_servers_as_by_http(setup, stub, fields):
    given = {"messages": [{"role": "user", "content": "hi"}], **fields}
    _, usage = await collect(stub.ChatCompletion(request(**given)))
    by_grpc = setup.mesh.decodes[0].requests[-1]
    messages = given.pop("messages")
    answer = await setup.client.chat.completions.create(model="tiny", messages=messages, extra_body=given)
    by_http = setup.mesh.decodes[0].requests[-1]
    assert list(by_grpc.prompt_ids) == list(by_http.prompt_ids)
    assert list(by_grpc.sampling.bad_words) == list(by_http.sampling.bad_words)
    assert by_grpc.sampling.max_tokens == by_http.sampling.max_tokens
    own = answer.usage.model_dump()["penstock"]
    assert (usage.dropped_tokens, usage.dropped_messages) == (own["dropped_tokens"], own["dropped_messages"])


@pytest.mark.parametrize("drafts", [True, False])
async def test_a_request_can_do_without_drafts(setup, stub, drafts):
    await collect(stub.ChatCompletion(request(messages=[{"role": "user", "content": "hi"}], no_drafts=not drafts)))
    assert setup.mesh.decodes[0].requests[-1].sampling.no_drafts == (not drafts)


async def test_old_messages_are_left_out_as_by_http(setup, stub):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        body = {"model": "tiny", "input": TURNS, "truncation": "auto", "max_output_tokens": 100}
        answer = (await client.post("/v1/responses", json=body)).json()
    by_http = setup.mesh.decodes[0].requests[-1]
    asked = request(messages=TURNS, truncation="auto", max_completion_tokens=100)
    _, usage = await collect(stub.ChatCompletion(asked))
    assert list(setup.mesh.decodes[0].requests[-1].prompt_ids) == list(by_http.prompt_ids)
    assert usage.dropped_messages == answer["usage"]["penstock"]["dropped_messages"] > 0
    for truncation in ("", "disabled"):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await collect(stub.ChatCompletion(request(messages=TURNS, truncation=truncation)))
        assert from_rpc(failed.value).field == "messages"


async def test_only_the_last_tokens_of_raw_prompts_are_read(setup, stub):
    asked = gateway_pb2.CompletionRequest(model="tiny", prompts=[LONG], truncate_prompt_tokens=9)
    [*_, last] = [chunk async for chunk in stub.Completion(asked)]
    assert list(setup.mesh.decodes[0].requests[-1].prompt_ids) == setup.ids(LONG)[-9:]
    assert (last.usage.prompt_tokens, last.usage.dropped_tokens) == (9, len(setup.ids(LONG)) - 9)


async def test_models(setup, stub):
    answer = await stub.ListModels(gateway_pb2.ListModelsRequest())
    assert [(model.id, model.context_length) for model in answer.models] == [("tiny", 2048)]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 100}, "n"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [gateway_pb2.ChatMessage(role="x")]}, "messages[0].role"),
        (
            {"messages": [gateway_pb2.ChatMessage(role="tool")]},
            "messages[0].tool_call_id",
        ),
        ({"messages": [told(content="a", parts=[{"text": "b"}])]}, "messages[0].parts"),
        ({"messages": [told(parts=[{"text": "b"}, {}])]}, "messages[0].parts[1]"),
        ({"messages": [told("system", parts=[{"image_url": PICTURE}])]}, "messages[0].parts[0].image_url"),
        ({"messages": [told(parts=[{"text": "b"}, {"image_url": PICTURE}])]}, "messages[0].parts[1].image_url"),
        (
            {"tools": [gateway_pb2.FunctionTool(name="f", parameters="[")]},
            "tools[0].parameters",
        ),
        ({"tools": [gateway_pb2.FunctionTool()]}, "tools[0].name"),
        ({"stop": [""]}, "stop"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation": "some"}, "truncation"),
        ({"truncation": "auto", "truncate_prompt_tokens": 5}, "truncation"),
        ({"chat_template_kwargs": "[]"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": '{"a":' + 200 * "[" + 200 * "]" + "}"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": '{"colour": 1}'}, "chat_template_kwargs.colour"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [CALLED]}, "messages"),
    ],
)
async def test_bad_input(setup, stub, fields, field):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await collect(stub.ChatCompletion(request(**fields)))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc(failed.value).field == field
    assert setup.mesh.router.asks == []


async def test_other_refusals(opened):
    async with opened(failover_s=0.3) as setup, grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await collect(
                stub.ChatCompletion(gateway_pb2.ChatCompletionRequest(model="other", messages=request().messages))
            )
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        setup.script.refuse = Unavailable("127.0.0.1:5 is away")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await collect(stub.ChatCompletion(request()))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.1" not in failed.value.details()


async def test_a_request_waits_for_workers_as_long_as_its_deadline_allows(opened):
    """Without one it would have given up after the first moment."""
    async with opened(failover_s=0.05) as setup, grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        setup.script.refuse = Unavailable("no worker is here")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await collect(stub.ChatCompletion(request()))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        before = len(setup.mesh.router.asks)
        asking = asyncio.create_task(collect(stub.ChatCompletion(request(), timeout=60)))
        await setup.mesh.until(lambda: len(setup.mesh.router.asks) >= before + 5)
        setup.script.refuse = None
        text, _ = await asking
        assert text


async def test_the_callers_deadline_reaches_the_workers(setup, stub):
    setup.script.hang = True
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await collect(stub.ChatCompletion(request(), timeout=0.3))
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await setup.mesh.until(lambda: setup.mesh.live == 0)


async def test_a_deadline_is_no_part_of_the_time_that_was_needed(setup, stub):
    begin = time.perf_counter()
    _, usage = await collect(stub.ChatCompletion(request(), timeout=60))
    took = time.perf_counter() - begin
    assert 0 < usage.seconds["total"] <= took
    assert 0 <= usage.seconds["body"] <= took


async def test_session_and_credentials_come_as_metadata(opened, tmp_path):
    keys = key_file(tmp_path / "keys.json", {"secret-a": "a"})
    async with opened(api_keys=keys, server_key="ab" * 16, api_key="secret-a") as setup:
        async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await collect(stub.ChatCompletion(request()))
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListModels(gateway_pb2.ListModelsRequest())
            metadata = (("authorization", "Bearer secret-a"), ("x-session-affinity", "s1"), ("x-request-id", "r-1"))
            await collect(stub.ChatCompletion(request(), metadata=metadata))
        await setup.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], extra_headers={"x-session-affinity": "s1"}
        )
        first, second = setup.mesh.router.asks
        assert first.session == second.session != ""
        assert first.tenant == second.tenant == "a"
        assert setup.mesh.prefills[0].requests[0].request_id.startswith("r-1.")


async def test_raw_prompts_as_by_http(setup, stub):
    ask = {"n": 2, "seed": 7, "temperature": 0.5, "top_k": 9, "logprobs": True, "top_logprobs": 1}
    prompts = ["the quick", "brown"]
    asked = gateway_pb2.CompletionRequest(model="tiny", prompts=prompts, return_token_ids=True, max_tokens=5, **ask)
    chunks = [chunk async for chunk in stub.Completion(asked)]
    by_grpc = {tuple(one.prompt_ids): one.cache_root for one in setup.mesh.decodes[0].requests}
    setup.mesh.decodes[0].requests.clear()
    options = {"n": 2, "seed": 7, "temperature": 0.5, "logprobs": 1, "max_tokens": 5}
    more = {"top_k": 9, "return_token_ids": True}
    answer = await setup.client.completions.create(model="tiny", prompt=prompts, **options, extra_body=more)
    by_http = {tuple(one.prompt_ids): one.cache_root for one in setup.mesh.decodes[0].requests}
    assert by_grpc == by_http and by_grpc
    for choice in answer.choices:
        mine = [chunk for chunk in chunks if chunk.choice == choice.index and not chunk.HasField("usage")]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert "".join(chunk.finish_reason for chunk in mine) == choice.finish_reason
        assert [token for chunk in mine for token in chunk.token_ids] == choice.token_ids
        assert [round(one.logprob, 4) for chunk in mine for one in chunk.logprobs] == choice.logprobs.token_logprobs
    usage = chunks[-1].usage
    assert usage.prompt_tokens == answer.usage.prompt_tokens
    assert usage.completion_tokens == answer.usage.completion_tokens == 20
    ids = gateway_pb2.TokenPrompt(ids=setup.ids("the quick"))
    again = gateway_pb2.CompletionRequest(model="tiny", token_prompts=[ids])
    assert "".join([chunk.text async for chunk in stub.Completion(again)]) == "The quick brown fox."


@pytest.mark.parametrize("fields", [{}, {"prompts": ["a"], "token_prompts": [gateway_pb2.TokenPrompt(ids=[1])]}])
async def test_raw_prompts_come_in_one_form(stub, fields):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [chunk async for chunk in stub.Completion(gateway_pb2.CompletionRequest(model="tiny", **fields))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "prompts" in caught.value.details()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompts": ["a", ""]}, "prompts"),
        ({"prompts": ["a " * 5000]}, "prompts"),
        ({"token_prompts": [gateway_pb2.TokenPrompt()]}, "token_prompts"),
        ({"token_prompts": [gateway_pb2.TokenPrompt(ids=[2**31])]}, "token_prompts"),
    ],
)
async def test_a_refused_raw_prompt_is_called_by_its_own_field(stub, fields, field):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [chunk async for chunk in stub.Completion(gateway_pb2.CompletionRequest(model="tiny", **fields))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc(caught.value).field == field and field in caught.value.details()


async def test_a_client_that_cancels_a_completion_ends_its_work(setup, stub):
    setup.script.hang = True
    call = stub.Completion(gateway_pb2.CompletionRequest(model="tiny", prompts=["a"]))
    async for chunk in call:
        assert chunk.text
        break
    call.cancel()
    await setup.mesh.until(lambda: setup.mesh.live == 0)


SMALL = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
"""Of a client that buffers little, so that a short answer is more than that."""


async def test_who_does_not_read_is_not_waited_for(opened, monkeypatch):
    """The call ends and gives all that it held back; who reads after all hears why."""
    monkeypatch.setattr("penstock.gateway.service.STALL_S", 0.3)
    async with opened() as setup, grpc.aio.insecure_channel(setup.gateway.grpc_address, options=SMALL) as channel:
        setup.says("the quick brown fox " * 200)
        setup.script.pace_s = 0.001
        stub = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.ChatCompletion(request(n=4, logprobs=True, top_logprobs=20, ignore_eos=True))
        reception = setup.gateway.reception
        await setup.mesh.until(lambda: setup.mesh.live > 0)
        await setup.mesh.until(lambda: setup.mesh.live == 0)
        async with asyncio.timeout(10):
            await reception.admission.idle()
        assert not call.done()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in call:
                pass
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "not taken a message of its answer for 0.3 s" in failed.value.details()
        choices, _ = await collect(stub.ChatCompletion(request()))
        assert choices


@pytest.mark.parametrize("on", [True, False])
async def test_reflection_is_a_setting(opened, on):
    async with opened(reflection=on) as setup, grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if on:
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert "penstock.v1.Gateway" in names
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
