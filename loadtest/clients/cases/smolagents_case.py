"""smolagents: the agent that calls tools, with its default of a required call in each turn."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from case import ENDLESS, KEY, MODEL, URL, WEATHER, City, case, leaving, report
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

CALLED: list[str] = []


def model(**more: object) -> OpenAIServerModel:
    return OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, **{"max_tokens": 300, **more})


@tool
def get_weather(city: City) -> str:
    """The weather in a city.

    Args:
        city: The city.
    """
    CALLED.append(city)
    return "7 degrees, rain"


@case
def chat():
    assert model().generate([{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]).content


@case
def stream():
    said = [each.content for each in model().generate_stream([{"role": "user", "content": "Hello!"}])]
    assert any(said)


@case
async def cancel():
    """The model closes its connections: closing the stream leaves its connection open."""

    def leave() -> None:
        asked = model(max_tokens=8000, extra_body=ENDLESS)
        next(asked.generate_stream([{"role": "user", "content": "Hello!"}]))
        asked.client.close()

    async with leaving():
        await asyncio.to_thread(leave)


@case
def tools():
    """The agent's own prompt is longer than a small model understands; what counts is that each turn is a call."""
    agent = ToolCallingAgent(tools=[get_weather], model=model(), max_steps=2, verbosity_level=0)
    agent.run(WEATHER)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps, [getattr(step, "error", None) for step in agent.memory.steps]


report(smolagents=version("smolagents"), openai=version("openai"))
