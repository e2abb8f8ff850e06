"""The official client of Anthropic's API."""

from __future__ import annotations

import asyncio

import anthropic
from anthropic import AsyncAnthropic
from case import ENDLESS_SCHEMA, HISTORY, KEY, MODEL, SESSION, URL, WEATHER, case, leaving, report

CLIENT = AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]},
}


@case
async def chat():
    messages = [{"role": "user", "content": "Hello!"}]
    first = await CLIENT.messages.create(model=MODEL, max_tokens=40, system="Be brief.", messages=messages)
    assert first.content[0].text and first.usage.output_tokens
    more = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And again?"}]
    assert (await CLIENT.messages.create(model=MODEL, max_tokens=40, messages=more)).content
    assert (await CLIENT.messages.count_tokens(model=MODEL, messages=more)).input_tokens > 10


@case
async def stream():
    asked = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Hello!"}]}
    async with CLIENT.messages.stream(**asked) as events:
        text = "".join([piece async for piece in events.text_stream])
        assert text == (await events.get_final_message()).content[0].text


@case
async def tools():
    messages = [{"role": "user", "content": WEATHER}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        asked = {"model": MODEL, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
        answer = await CLIENT.messages.create(**asked, messages=messages)
        assert answer.stop_reason == "tool_use"
        call = next(block for block in answer.content if block.type == "tool_use")
        assert call.name == "get_weather" and list(call.input) == ["city"]
        result = [{"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees, rain"}]
        more = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": result}]
        done = await CLIENT.messages.create(model=MODEL, max_tokens=60, tools=[TOOL], messages=more)
        assert done.stop_reason in ("end_turn", "max_tokens", "tool_use")


@case
async def errors():
    try:
        await CLIENT.messages.create(model="nobody", max_tokens=4, messages=[{"role": "user", "content": "x"}])
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("a model that does not exist was served")


@case
async def second_turn_is_cached():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": HISTORY, "cache_control": {"type": "ephemeral"}}]}
    ]
    cached = []
    for _ in range(2):
        answer = await CLIENT.messages.create(model=MODEL, messages=messages, max_tokens=20, extra_headers=SESSION)
        cached.append(answer.usage.cache_read_input_tokens)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And then?"}]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    output = {"format": {"type": "json_schema", "schema": ENDLESS_SCHEMA}}
    asked = {"max_tokens": 8000, "messages": [{"role": "user", "content": "Hello!"}], "output_config": output}
    async with leaving():
        async with CLIENT.messages.stream(model=MODEL, **asked) as events:
            async for _ in events.text_stream:
                break


@case
async def eight_at_once():
    asked = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
    assert all(each.content for each in await asyncio.gather(*(CLIENT.messages.create(**asked) for _ in range(8))))


report(anthropic=anthropic.__version__)
