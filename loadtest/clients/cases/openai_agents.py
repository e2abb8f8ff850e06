"""openai-agents with its defaults: the Responses API, strict tools, handoffs, an output type."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from case import ENDLESS_SCHEMA, HISTORY, KEY, MODEL, SESSION, URL, WEATHER, City, case, leaving, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), use_for_tracing=False)
set_tracing_disabled(True)
SHORT = ModelSettings(max_tokens=200, temperature=0)
CALLED: list[str] = []


class Place(BaseModel):
    city: City


@function_tool
def get_weather(city: City) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return "7 degrees, rain"


@case
async def chat():
    """The second turn has an output type: this client takes an answer that the limit ended for an error."""
    agent = Agent(name="a", instructions="Be brief.", model=MODEL, model_settings=SHORT)
    first = await Runner.run(agent, "Hello!")
    assert first.final_output
    again = [*first.to_input_list(), {"role": "user", "content": "And again?"}]
    assert (await Runner.run(agent.clone(output_type=Place), again)).final_output


@case
async def stream():
    agent = Agent(name="a", instructions="Be brief.", model=MODEL, model_settings=SHORT)
    run = Runner.run_streamed(agent, "Hello!")
    kinds = {event.type async for event in run.stream_events()}
    assert "raw_response_event" in kinds and run.final_output


@case
async def tools():
    CALLED.clear()
    settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="a", instructions="Use tools.", model=MODEL, tools=[get_weather], model_settings=settings)
    result = await Runner.run(agent, WEATHER, max_turns=4)
    assert CALLED and result.final_output is not None


@case
async def handoff():
    other = Agent(name="weather", instructions="Be brief.", model=MODEL, model_settings=SHORT)
    settings = ModelSettings(max_tokens=200, tool_choice="required")
    agent = Agent(name="a", instructions="Hand off.", model=MODEL, handoffs=[other], model_settings=settings)
    result = await Runner.run(agent, WEATHER, max_turns=4)
    assert result.last_agent.name == "weather"


@case
async def structured():
    agent = Agent(name="a", instructions="Be brief.", model=MODEL, output_type=Place, model_settings=ModelSettings())
    assert isinstance((await Runner.run(agent, "Oslo")).final_output, Place)


@case
async def second_turn_is_cached():
    settings = ModelSettings(max_tokens=200, extra_headers=SESSION)
    agent = Agent(name="a", instructions="Be brief.", model=MODEL, output_type=Place, model_settings=settings)
    first = await Runner.run(agent, HISTORY)
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And then?"}])
    cached = [each.context_wrapper.usage.input_tokens_details.cached_tokens for each in (first, second)]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    text = {"format": {"type": "json_schema", "name": "long", "schema": ENDLESS_SCHEMA}}
    agent = Agent(
        name="a", instructions="Be brief.", model=MODEL, model_settings=ModelSettings(extra_body={"text": text})
    )
    async with leaving():
        run = Runner.run_streamed(agent, "Hello!")
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                run.cancel()


@case
async def eight_at_once():
    agent = Agent(name="a", instructions="Be brief.", model=MODEL, model_settings=ModelSettings(max_tokens=20))
    assert all(
        each.final_output is not None for each in await asyncio.gather(*(Runner.run(agent, "Hi") for _ in range(8)))
    )


report(openai_agents=version("openai-agents"), openai=version("openai"))
