"""pydantic-ai with its default profile."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from case import ENDLESS, HISTORY, KEY, MODEL, SESSION, URL, WEATHER, City, case, leaving, report
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL_OF_OURS = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
SHORT = {"max_tokens": 300, "temperature": 0}


class Place(BaseModel):
    city: City


@case
async def chat():
    agent = Agent(MODEL_OF_OURS, model_settings=SHORT)
    first = await agent.run("Hello!")
    assert first.output and first.usage.total_tokens
    assert (await agent.run("And again?", message_history=first.all_messages())).output


@case
async def stream():
    agent = Agent(MODEL_OF_OURS, model_settings=SHORT)
    async with agent.run_stream("Hello!") as run:
        assert [text async for text in run.stream_text()]
        assert run.usage.output_tokens


@case
async def tools():
    called = []
    agent = Agent(MODEL_OF_OURS, model_settings=SHORT)

    @agent.tool_plain
    def get_weather(city: City) -> str:
        """The weather in a city."""
        called.append(city)
        return "7 degrees, rain"

    assert (await agent.run(WEATHER)).output is not None
    assert called


@case
async def structured():
    for output in (Place, NativeOutput(Place)):
        agent = Agent(MODEL_OF_OURS, output_type=output, model_settings=SHORT)
        assert isinstance((await agent.run("Which city? Oslo")).output, Place)


@case
async def json_object():
    """Any object, which a small model may fill to the limit, or with other names than it was asked for."""
    agent = Agent(MODEL_OF_OURS, output_type=PromptedOutput(Place), model_settings=SHORT)
    try:
        assert isinstance((await agent.run("Which city? Oslo")).output, Place)
    except UnexpectedModelBehavior as error:
        assert not isinstance(error, ModelHTTPError), error


@case
async def second_turn_is_cached():
    agent = Agent(MODEL_OF_OURS, model_settings={"max_tokens": 20, "extra_headers": SESSION})
    first = await agent.run(HISTORY)
    second = await agent.run("And then?", message_history=first.all_messages())
    cached = [each.usage.cache_read_tokens for each in (first, second)]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    agent = Agent(MODEL_OF_OURS, model_settings={"extra_body": ENDLESS})
    async with leaving():
        async with agent.run_stream("Hello!") as run:
            async for _ in run.stream_text():
                break


@case
async def eight_at_once():
    agent = Agent(MODEL_OF_OURS, model_settings={"max_tokens": 20})
    assert all(each.output is not None for each in await asyncio.gather(*(agent.run("Hi") for _ in range(8))))


report(pydantic_ai=version("pydantic-ai-slim"), openai=version("openai"))
