"""Messages, through Anthropic's own client: whole and streamed, tools, what is cached, errors."""

from __future__ import annotations

import json

import anthropic
import httpx2
import pytest

from penstock.errors import Overloaded
from penstock.testing.keys import key_file
from penstock.v1 import common_pb2

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'
OTHER = CALL.replace("Tromsø", "Oslo")


@pytest.fixture
async def client(setup):
    async with anthropic.AsyncAnthropic(base_url=setup.url, api_key="none", max_retries=0) as made:
        yield made


async def whole(client, **options):
    return await client.messages.create(**{"model": "tiny", "max_tokens": 100, "messages": HELLO, **options})


async def streamed(client, **options):
    """The message that the client's own helper builds of a stream, whose events are checked on the way."""
    given = {"model": "tiny", "max_tokens": 100, "messages": HELLO, **options}
    kinds, at = [], None
    async with client.messages.stream(**given) as stream:
        async for event in stream:
            if event.type not in (
                "message_start", "content_block_start", "content_block_delta", "content_block_stop",
                "message_delta", "message_stop",
            ):  # fmt: skip
                continue  # the helper's own
            kinds.append(event.type)
            if event.type == "content_block_start":
                assert at is None
                at = event.index
            elif event.type.startswith("content_block"):
                assert event.index == at
                at = None if event.type == "content_block_stop" else at
        assert at is None
        assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")
        return await stream.get_final_message()


def plain(message) -> dict:
    found = message.model_dump()
    found.pop("id")
    for name in ("times", "session", "seed"):
        (found["usage"].get("penstock") or {}).pop(name, None)
    for block in found["content"]:
        if block["type"] == "tool_use":
            block.pop("id")
        block.pop("parsed_output", None)
    found["usage"].pop("penstock", None)
    return found


async def both(client, **options):
    first, second = await whole(client, **options), await streamed(client, **options)
    one, other = plain(first), plain(second)
    for name in ("cache_creation", "service_tier"):
        one["usage"].pop(name), other["usage"].pop(name)
    assert one == other
    return first


def prompt_of(setup) -> str:
    ids = list(setup.mesh.prefills[0].requests[-1].prompt_ids)
    return setup.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("batch", [1, 3, 50])
async def test_text(setup, client, batch):
    setup.script.batch = batch
    message = await both(client)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "The quick brown fox."
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "tiny")
    assert (message.role, message.type) == ("assistant", "message") and message.id.startswith("msg_")


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
async def test_blocks_keep_their_order(setup, client, batch):
    setup.script.batch = batch
    setup.says(f"<think>hm</think>Let me look.\n{CALL}\n{OTHER}")
    message = await both(client, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message.content
    assert thinking.thinking == "hm" and thinking.signature and text.text == "Let me look."
    assert (first.name, first.input, second.input) == ("get_weather", {"city": "Tromsø"}, {"city": "Oslo"})
    assert message.stop_reason == "tool_use" and first.id != second.id


async def test_a_tool_loop_comes_back_as_it_was_said(setup, client):
    said = f"Let me look.\n{CALL}"
    setup.says(said)
    first = await whole(client, tools=TOOLS, system="Be brief.")
    prompt = prompt_of(setup)
    assert prompt.startswith("<|im_start|>system\nBe brief.")
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "clear"}]}
    turns = [*HELLO, first.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    await whole(client, tools=TOOLS, system="Be brief.", messages=turns)
    after = prompt_of(setup)
    assert after.startswith(prompt + said)
    assert "clear" in after and after.endswith("<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n")
    await whole(client, tools=TOOLS, messages=[*turns[:2], {"role": "user", "content": [result | {"is_error": True}]}])
    assert "Error: clear" in prompt_of(setup)


async def test_thinking_comes_back(setup, client):
    setup.says("<think>hm</think>Yes.")
    first = await whole(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert first.usage.output_tokens_details.thinking_tokens > 0
    blocks = [*first.to_param()["content"], {"type": "redacted_thinking", "data": "x"}]
    await whole(client, messages=[*HELLO, {"role": "assistant", "content": blocks}, *HELLO])
    assert "assistant\nYes.<|im_end|>" in prompt_of(setup)


@pytest.mark.parametrize(("stops", "stop", "text"), [(["brown", "fox"], "brown", "The quick "), (["zzz"], None, None)])
async def test_stop_sequences(setup, client, stops, stop, text):
    message = await both(client, stop_sequences=stops)
    assert message.stop_sequence == stop and message.stop_reason == ("stop_sequence" if stop else "end_turn")
    assert message.content[0].text == (text or "The quick brown fox.")


async def test_max_tokens(setup, client):
    message = await both(client, max_tokens=2)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 2


async def test_a_call_that_the_limit_cuts(setup, client):
    setup.says(CALL)
    for most in range(1, len(setup.ids(CALL))):
        message = await whole(client, tools=TOOLS, max_tokens=most)
        assert message.stop_reason == "max_tokens"
        assert all(block.input in ({}, {"city": "Tromsø"}) for block in message.content if block.type == "tool_use")


async def test_every_field_arrives(setup, client):
    await whole(
        client, extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.75}, max_tokens=9, metadata={"user_id": "u"},
        service_tier="auto", output_config={"effort": "low"},
    )  # fmt: skip
    sampling = setup.mesh.decodes[0].requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 7, 0.75, 9)


async def test_usage_counts_every_token_once(setup, client):
    setup.script.cached = {"host": 8, "nvme": 4}
    usage = (await both(client)).usage
    prompt = len(setup.mesh.decodes[0].requests[-1].prompt_ids)
    assert usage.cache_read_input_tokens == 12 and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens == prompt - 12
    assert usage.output_tokens == len(setup.ids("The quick brown fox.")) + 1


async def test_cache_control_keeps_the_prompt(setup, client):
    setup.script.cached = {"host": 8}
    setup.script.retained = common_pb2.Retained(blocks=5, seconds=300)
    control = {"type": "ephemeral"}
    system = [{"type": "text", "text": "You are brief. " * 4, "cache_control": control}]
    usage = (await whole(client, system=system)).usage
    [keep] = setup.mesh.decodes[0].requests[-1].retain
    assert keep.ttl_s == 300 and keep.blocks > 0
    assert usage.cache_creation_input_tokens == 5 * 4 - 8
    assert usage.cache_creation.ephemeral_5m_input_tokens == 12 and usage.cache_creation.ephemeral_1h_input_tokens == 0
    prompt = len(setup.mesh.decodes[0].requests[-1].prompt_ids)
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == prompt
    hour = {"type": "ephemeral", "ttl": "1h"}
    marked = [{"role": "user", "content": [{"type": "text", "text": "a b c d e f", "cache_control": hour}]}]
    usage = (await whole(client, system=system, messages=marked, tools=[{**TOOLS[0], "cache_control": hour}])).usage
    assert [keep.ttl_s for keep in setup.mesh.decodes[0].requests[-1].retain] == [3600, 300, 3600]
    assert usage.cache_creation.ephemeral_1h_input_tokens == 12
    await whole(client, extra_body={"cache_control": hour})
    assert [keep.ttl_s for keep in setup.mesh.decodes[0].requests[-1].retain] == [3600]


CONTROL = {"type": "ephemeral"}
USE = {"type": "tool_use", "id": "c", "name": "f"}
REFUSED = [
    ({"temperature": 1.5}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [{**USE, "input": {}}]}]}, "has calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].source"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source: must have"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": TOOLS}, "'g' is not among the tools"),
    ({"tool_choice": {"type": "auto", "name": "g"}, "tools": TOOLS}, "tool_choice.name"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"made_up": 1}, "made_up"),
    ({"messages": [{"role": "user", "content": []}], "tools": [{**TOOLS[0], "cache_control": CONTROL}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "input": []}]}, *HELLO]}, "input: must be an object"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "id": ""}]}, *HELLO]}, "messages[0].content[0].id"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"cache_control": {"type": "forever"}}, "cache_control.type"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
async def test_refused_by_name(setup, client, options, words):
    with pytest.raises(anthropic.BadRequestError) as caught:
        await whole(client, extra_body=options)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"] and body["request_id"] == caught.value.request_id


async def test_max_tokens_is_required(setup):
    async with httpx2.AsyncClient() as plain_client:
        answer = await plain_client.post(f"{setup.url}/v1/messages", json={"model": "tiny", "messages": HELLO})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "max_tokens: is required"


async def test_errors_have_anthropics_types(setup, client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await whole(client, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    setup.script.refuse = Overloaded("too much", retry_after=3)
    with pytest.raises(anthropic.InternalServerError) as caught:
        await streamed(client)
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert caught.value.response.headers["retry-after"] == "3"
    with pytest.raises(anthropic.BadRequestError) as caught:
        await whole(client, messages=[{"role": "user", "content": "a b c " * 5000}])
    assert "maximum context length" in caught.value.message


async def test_a_failure_in_the_middle(opened):
    async with opened(request_timeout_s=0.5) as setup:
        setup.script.hang = True
        async with anthropic.AsyncAnthropic(base_url=setup.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await streamed(client)
        assert caught.value.body["error"]["type"] == "timeout_error"


async def test_a_silent_stream_gets_pings(opened):
    async with opened(first_ping_s=0.05, ping_s=0.05, request_timeout_s=1.0) as setup:
        setup.script.hang = True
        body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": True}
        async with httpx2.AsyncClient() as plain_client:
            answer = await plain_client.post(f"{setup.url}/v1/messages", json=body)
        events = [
            event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n") if not event.startswith(":")
        ]
        assert events[0][0] == "event: message_start" and events[-1][0] == "event: error"
        assert ["event: ping", 'data: {"type": "ping"}'] in events
        assert all(name == f"event: {json.loads(data.removeprefix('data: '))['type']}" for name, data in events)


async def test_both_headers_carry_a_key(opened, tmp_path):
    keys = key_file(tmp_path / "keys.json", {"key-of-one": "one"})
    async with opened(api_key="key-of-one", api_keys=keys, server_key="ab" * 16) as setup:
        for options in ({"api_key": "key-of-one"}, {"auth_token": "key-of-one", "api_key": None}):
            async with anthropic.AsyncAnthropic(base_url=setup.url, max_retries=0, **options) as client:
                assert (await whole(client)).content
        async with anthropic.AsyncAnthropic(base_url=setup.url, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await whole(client)
            assert caught.value.body["error"]["type"] == "authentication_error"


async def test_the_form_of_the_output_is_a_grammar(setup, client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    setup.says('{"a": 1}')
    await both(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert setup.mesh.decodes[0].requests[-1].sampling.grammar


@pytest.mark.parametrize("depth", [100, 800, 900, 950, 980, 1000, 2000, 50_000])
async def test_inputs_of_any_depth_are_read_or_refused(setup, depth):
    use = {**USE, "input": {"a": "DEEP"}}
    turns = [*HELLO, {"role": "assistant", "content": [use]}, *HELLO]
    body = json.dumps({"model": "tiny", "max_tokens": 5, "messages": turns}).replace(
        '"DEEP"', "[" * depth + "]" * depth
    )
    async with httpx2.AsyncClient() as plain_client:
        answer = await plain_client.post(f"{setup.url}/v1/messages", content=body)
    assert answer.status_code in (200, 400), answer.text
