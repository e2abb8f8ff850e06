"""Responses, through the official client: whole and streamed, tools, reasoning, and the grammar of the events."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx2
import openai
import pydantic
import pytest

from penstock.errors import Unavailable
from penstock.gateway.api.responses.shapes import ResponseShape

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Tromsø"}}\n</tool_call>'
OTHER = CALL.replace("Tromsø", "Oslo")


async def whole(client, **options):
    return await client.responses.create(**{"model": "tiny", "input": "Hello", **options})


async def streamed(client, **options) -> list:
    stream = await client.responses.create(**{"model": "tiny", "input": "Hello", "stream": True, **options})
    return [event async for event in stream]


def plain(response) -> dict:
    """A response without what differs between two equal requests."""
    found = response.model_dump(by_alias=True)
    found["usage"]["penstock"].pop("times")
    for name in ("session", "seed"):
        found["usage"]["penstock"].pop(name)
    for name in ("id", "created_at", "completed_at"):
        found.pop(name)
    for item in found["output"]:
        item["id"] = item["id"].split("_")[0]
        item.pop("call_id", None)
    return found


def check(events: Sequence) -> dict[int, object]:
    """Holds a stream against the grammar of events; returns the items that their deltas build."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete") and not events[0].response.output
    built, open_item, part, text = {}, None, False, ""
    for event, kind in zip(events[2:-1], kinds[2:-1], strict=True):
        if kind == "output_item.added":
            assert open_item is None and event.output_index == len(built) and event.item.status == "in_progress"
            open_item, text = event.item, ""
            built[event.output_index] = None
            continue
        assert open_item is not None and event.output_index == len(built) - 1
        if kind == "output_item.done":
            assert not part and event.item.id == open_item.id
            built[event.output_index] = event.item
            open_item = None
            continue
        assert event.item_id == open_item.id
        if kind == "content_part.added":
            assert not part
            part = True
        elif kind == "content_part.done":
            assert part and event.part.text == text
            part = False
        elif kind.endswith(".delta"):
            assert event.delta and (part or open_item.type == "function_call")
            text += event.delta
        else:
            assert kind.endswith(".done") and text == (
                event.arguments if kind.startswith("function_call") else event.text
            )
    assert open_item is None and not part
    assert list(built.values()) == events[-1].response.output
    return built


async def both(setup, **options):
    """The response, whole and streamed, which must be equal."""
    first = await whole(setup.client, **options)
    events = await streamed(setup.client, **options)
    check(events)
    assert plain(first) == plain(events[-1].response)
    return first


@pytest.mark.parametrize("batch", [1, 3, 50])
async def test_text(setup, batch):
    setup.script.batch = batch
    response = await both(setup)
    assert response.output_text == "The quick brown fox."
    assert (response.status, response.object, response.model) == ("completed", "response", "tiny")
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.id.startswith("resp_") and item.id.startswith("msg_")


async def test_usage_is_exact(setup):
    setup.script.cached = {"host": 8, "nvme": 4}
    usage = (await both(setup)).usage
    assert usage.input_tokens == len(setup.mesh.decodes[0].requests[-1].prompt_ids)
    assert usage.input_tokens_details.cached_tokens == 12 and usage.input_tokens_details.cache_write_tokens == 0
    assert usage.output_tokens == len(setup.ids("The quick brown fox.")) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    own = usage.model_dump()["penstock"]
    assert own["cached_tokens"] == {"worker": 0, "gpu": 0, "host": 8, "nvme": 4, "remote": 0}
    assert own["computed_tokens"] == usage.input_tokens - 12


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
async def test_calls_and_text_keep_their_order(setup, batch):
    setup.script.batch = batch
    setup.says(f"<think>hm</think>Let me look.\n{CALL}\n{OTHER}")
    response = await both(setup, tools=TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == "hm" and message.content[0].text == "Let me look."
    assert (first.name, first.arguments) == ("get_weather", '{"city":  "Tromsø"}')
    assert json.loads(second.arguments) == {"city": "Oslo"}
    assert first.call_id != second.call_id and first.id != second.id
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


async def test_cut_at_every_token(setup):
    text = f"<think>hm</think>So.\n{CALL}"
    setup.says(text)
    for most in range(1, len(setup.ids(text)) + 1):
        response = await both(setup, tools=TOOLS, max_output_tokens=most)
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        assert response.output and response.output[-1].status == "incomplete"
    response = await both(setup, tools=TOOLS, max_output_tokens=most + 1)
    assert response.status == "completed" and response.incomplete_details is None


async def test_a_tool_loop(setup):
    """What comes back is what was said: the second prompt begins with the first and its answer."""
    said = f"Let me look.\n{CALL}"
    setup.says(said)
    items = [{"role": "user", "content": "Weather?"}]
    first = await whole(setup.client, input=items, tools=TOOLS, instructions="Be brief.", store=False)
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.")
    items += [item.model_dump() for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": '{"sky": "clear"}'})
    setup.says("Clear.")
    second = await whole(setup.client, input=items, tools=TOOLS, instructions="Be brief.", store=False)
    after = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    assert after.startswith(prompt + said) and '{"sky": "clear"}' in after
    assert second.output_text == "Clear."


async def test_messages_of_all_forms(setup):
    await whole(
        setup.client,
        instructions="I",
        input=[
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        ],
    )
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    said = ["system\nI", "system\nD", "user\na", "assistant\nbno", "user\ncd", "assistant\n"]
    assert prompt == "<|im_end|>\n".join(f"<|im_start|>{part}" for part in said)


async def test_reasoning_comes_back_by_its_opaque_form(setup):
    setup.says("<think>hm</think>Yes.")
    first = await both(setup, include=["reasoning.encrypted_content"])
    sealed = first.output[0].encrypted_content
    items = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Sure?"},
    ]
    await whole(setup.client, input=items, tools=TOOLS)
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    shown = [*items[:1], {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, *items[2:]]
    await whole(setup.client, input=shown, tools=TOOLS)
    same = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    assert prompt == same


async def test_what_the_client_sent_is_told_again(setup):
    response = await both(
        setup,
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=100,
        user="somebody",
        reasoning={"effort": "low"},
        tools=TOOLS,
        tool_choice="none",
        parallel_tool_calls=True,
        truncation="disabled",
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        text={"format": {"type": "text"}},
    )
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "somebody")
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.25, 100)
    assert (response.tool_choice, response.parallel_tool_calls, response.truncation) == ("none", True, "disabled")
    assert response.tools[0].name == "get_weather" and response.reasoning.effort == "low"
    assert response.text.format.type == "text" and response.store is True
    sampling = setup.mesh.decodes[0].requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 100)


async def test_logprobs(setup):
    setup.says("fox 🎉")
    response = await both(setup, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "fox 🎉<|im_end|>"
    assert len(entries) == response.usage.output_tokens and all(len(entry.top_logprobs) == 2 for entry in entries)
    events = await streamed(setup.client, include=["message.output_text.logprobs"])
    assert sum(len(event.logprobs) for event in events if event.type.endswith("output_text.delta")) > 0


async def test_the_clients_own_helper_builds_the_same(setup):
    setup.says(f"Let me look.\n{CALL}")
    async with setup.client.responses.stream(model="tiny", input="Hello", tools=TOOLS) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == "Let me look."
    assert final.output[1].name == "get_weather"


async def test_raw_events_are_named(setup):
    async with httpx2.AsyncClient() as client:
        body = {"model": "tiny", "input": "Hello", "stream": True}
        answer = await client.post(f"{setup.url}/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event for event in answer.text.removesuffix("\n\n").split("\n\n") if not event.startswith(":")]
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in answer.text and events[-1].startswith("event: response.completed")


async def test_a_failure_in_the_middle(opened):
    async with opened(request_timeout_s=0.5) as setup:
        setup.script.hang = True
        events = await streamed(setup.client)
        assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
        failed = events[-1].response
        assert failed.status == "failed" and failed.error.code == "server_error" and failed.error.message
        assert failed.output[0].status == "incomplete" and failed.output[0].content[0].text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        setup.script.refuse = Unavailable("no worker is free")
        with pytest.raises(openai.InternalServerError) as caught:
            await streamed(setup.client)
        assert caught.value.status_code in (503, 504), "nothing has been sent yet: it is a status"


IMAGE = "input[0].content[0].image_url"
REFUSED = [
    ({"input": []}, "input"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "never"}, "truncation"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {}, "made_up": 1}]}, "tools[0].made_up"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].image_url",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "item_reference", "id": "msg_0_0"}]}, "input[0].id"),
    ({"previous_response_id": "resp_00"}, "previous_response_id"),
    ({"include": ["made_up"]}, "include"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"temperature": 101}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temprature": 1}, "temprature"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "?"}]}, "input[0].encrypted_content"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
]


@pytest.mark.parametrize(("options", "field"), REFUSED, ids=[field for _, field in REFUSED])
async def test_refused_by_name(setup, options, field):
    known = {name: value for name, value in options.items() if name != "temprature"}
    extra = {name: value for name, value in options.items() if name == "temprature"}
    with pytest.raises(openai.BadRequestError) as caught:
        await whole(setup.client, **known, extra_body=extra)
    assert caught.value.param == field and field.split(".")[0] in caught.value.message


async def test_a_prompt_that_is_too_long(setup):
    with pytest.raises(openai.BadRequestError) as caught:
        await whole(setup.client, input="a b c " * 5000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"


async def test_the_form_of_the_text_is_a_grammar(setup):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    setup.says('{"a": 1}')
    response = await both(setup, text={"format": form})
    assert response.text.format.type == "json_schema" and response.output_text == '{"a": 1}'
    assert setup.mesh.decodes[0].requests[-1].sampling.grammar
    with pytest.raises(openai.BadRequestError) as caught:
        await whole(setup.client, text={"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#/x"}}})
    assert caught.value.param.startswith("text.format.schema")


async def test_marks_keep_the_prompt_up_to_them(setup):
    parts = [{"type": "input_text", "text": "You are brief. " * 4, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    items = [
        {"role": "user", "content": parts},
        {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}},
    ]
    await whole(setup.client, input=items)
    keeps = setup.mesh.decodes[0].requests[-1].retain
    assert [keep.ttl_s for keep in keeps] == [3600, 300] and 0 < keeps[0].blocks < keeps[1].blocks


class Fox(pydantic.BaseModel):
    """What the client wants to read."""

    legs: int


async def test_the_clients_own_parser_reads_the_form(setup):
    setup.says('{"legs": 4}')
    parsed = await setup.client.responses.parse(model="tiny", input="A fox.", text_format=Fox)
    assert parsed.output_parsed == Fox(legs=4)
    async with setup.client.responses.stream(model="tiny", input="A fox.", text_format=Fox) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == Fox(legs=4)


async def test_a_stream_that_breaks_off_says_so_in_an_event(setup, monkeypatch):
    """Also where nothing is known of its answer any more, because of a defect."""

    def broken(*_args):
        raise ZeroDivisionError

    async with httpx2.AsyncClient(timeout=10) as client:
        body = {"model": "tiny", "input": "Hello", "stream": True}
        async with client.stream("POST", f"{setup.url}/v1/responses", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: response.created"
            monkeypatch.setattr(ResponseShape, "events", broken)
            monkeypatch.setattr(ResponseShape, "end", broken)
            rest = [line async for line in lines]
    at = rest.index("event: error")
    event = json.loads(rest[at + 1].removeprefix("data: "))
    assert event["type"] == "error" and event["error"]["message"] == "internal error"
    monkeypatch.undo()
    setup.script.hang = False
    monkeypatch.setattr(ResponseShape, "end", broken)
    with pytest.raises(openai.APIError, match="internal error"):
        await streamed(setup.client)


async def test_a_response_does_not_take_the_place_of_one_that_it_continues(setup):
    """As it would with the key of that one."""
    key = {"idempotency-key": "k"}
    first = await whole(setup.client, extra_headers=key)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="which this one continues") as refused:
            await whole(setup.client, previous_response_id=first.id, extra_headers=key, stream=stream)
        assert refused.value.body["param"] == "idempotency-key"
    second = await whole(setup.client, previous_response_id=first.id)
    assert second.id != first.id and (await setup.client.responses.retrieve(first.id)).id == first.id
