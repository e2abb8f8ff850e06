"""litellm, in front of an OpenAI-like server."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import litellm
from case import ENDLESS, HISTORY, KEY, MODEL, SESSION, URL, WEATHER, City, case, leaving, report
from pydantic import BaseModel

litellm.drop_params = False
litellm.suppress_debug_info = True
ASK = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 200, "num_retries": 0}
HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]},
    },
}


class Place(BaseModel):
    city: City


@case
async def chat():
    assert (await litellm.acompletion(messages=HELLO, **ASK)).choices[0].message.content


@case
async def stream():
    chunks = [chunk async for chunk in await litellm.acompletion(messages=HELLO, stream=True, **ASK)]
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content


@case
async def tools():
    asked = {**ASK, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = await litellm.acompletion(messages=[{"role": "user", "content": WEATHER}], **asked)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"


@case
async def structured():
    answer = await litellm.acompletion(messages=HELLO, response_format=Place, **ASK)
    Place.model_validate_json(answer.choices[0].message.content)


@case
async def errors():
    long = [{"role": "user", "content": "word " * 50_000}]
    try:
        await litellm.acompletion(messages=long, **ASK)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt beyond the context was not recognised")


@case
async def second_turn_is_cached():
    messages = [{"role": "user", "content": HISTORY}]
    cached = []
    for _ in range(2):
        answer = await litellm.acompletion(messages=messages, extra_headers=SESSION, **{**ASK, "max_tokens": 20})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    async with leaving():
        stream = await litellm.acompletion(messages=HELLO, stream=True, **{**ASK, "max_tokens": 8000, **ENDLESS})
        async for _ in stream:
            break
        await stream.aclose()


@case
async def eight_at_once():
    assert all(
        each.choices for each in await asyncio.gather(*(litellm.acompletion(messages=HELLO, **ASK) for _ in range(8)))
    )


report(litellm=version("litellm"), openai=version("openai"))
