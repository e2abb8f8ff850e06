"""The official Python client, and its helpers."""

from __future__ import annotations

import asyncio
import json

import openai
from case import ENDLESS, ENDLESS_SCHEMA, HISTORY, KEY, MODEL, SESSION, URL, WEATHER, City, begun, case, leaving, report
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    city: City
    capital: bool


class get_weather(BaseModel):  # the tool's name
    city: City


@case
async def chat():
    answer = await CLIENT.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40)
    assert answer.choices[0].message.content
    more = [*HELLO, answer.choices[0].message, {"role": "user", "content": "And what can you do?"}]
    assert (await CLIENT.chat.completions.create(model=MODEL, messages=more, max_tokens=40)).usage.total_tokens


@case
async def stream():
    stream = await CLIENT.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens > 0
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "response_format": Place}
    async with CLIENT.chat.completions.stream(**asked) as events:
        async for _ in events:
            pass
        assert isinstance((await events.get_final_completion()).choices[0].message.parsed, Place)


@case
async def tools():
    messages = [{"role": "user", "content": WEATHER}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}, "auto"):
        answer = await CLIENT.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        )
        if choice == "auto" and not answer.choices[0].message.tool_calls:
            continue
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and list(json.loads(call.function.arguments)) == ["city"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees, rain"}
        done = await CLIENT.chat.completions.create(
            model=MODEL, messages=[*messages, answer.choices[0].message, result], tools=[TOOL], max_tokens=60
        )
        assert done.choices[0].finish_reason in ("stop", "length", "tool_calls")


@case
async def structured():
    answer = await CLIENT.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Oslo"}], response_format=Place, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Place)
    answer = await CLIENT.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[pydantic_function_tool(get_weather)],
        tool_choice="required",
        max_tokens=400,
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, get_weather)
    answer = await CLIENT.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=300
    )
    if answer.choices[0].finish_reason == "stop":
        json.loads(answer.choices[0].message.content)


@case
async def responses():
    first = await CLIENT.responses.create(model=MODEL, input="Hello!", max_output_tokens=40)
    assert first.output_text and first.usage.total_tokens
    second = await CLIENT.responses.create(
        model=MODEL, input="And again?", previous_response_id=first.id, max_output_tokens=40
    )
    assert second.previous_response_id == first.id
    async with CLIENT.responses.stream(model=MODEL, input="Hello!", max_output_tokens=40) as events:
        kinds = [event.type async for event in events]
        assert (await events.get_final_response()).output_text
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    parsed = await CLIENT.responses.parse(model=MODEL, input="Oslo", text_format=Place, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Place)
    await CLIENT.responses.delete(first.id)


@case
async def second_turn_is_cached():
    messages = [{"role": "user", "content": HISTORY}]
    cached = []
    for _ in range(2):
        answer = await CLIENT.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, extra_headers=SESSION
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    """In the middle of streams, and before an answer is whole."""
    asked = {"model": MODEL, "messages": HELLO, "extra_body": ENDLESS}
    async with leaving():
        stream = await CLIENT.chat.completions.create(**asked, stream=True)
        async for _ in stream:
            break
        await stream.close()
    async with leaving():
        whole = asyncio.ensure_future(CLIENT.chat.completions.create(**asked))
        await begun()
        whole.cancel()
        await asyncio.wait([whole])
    text = {"format": {"type": "json_schema", "name": "long", "schema": ENDLESS_SCHEMA}}
    async with leaving():
        async with CLIENT.responses.stream(model=MODEL, input="Hello!", text=text) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    break


@case
async def eight_at_once():
    asked = (CLIENT.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20) for _ in range(8))
    assert all(answer.choices for answer in await asyncio.gather(*asked))


report(openai=openai.__version__)
