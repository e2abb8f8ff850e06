"""smolagents: the agent that calls tools, with its default of a required call in each turn."""

from __future__ import annotations

from importlib.metadata import version

from case import KEY, MODEL, URL, WEATHER, City, case, report
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

CALLED: list[str] = []


def model() -> OpenAIServerModel:
    return OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=300)


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
def tools():
    """The agent's own prompt is longer than a small model understands; what counts is that each turn is a call."""
    agent = ToolCallingAgent(tools=[get_weather], model=model(), max_steps=2, verbosity_level=0)
    agent.run(WEATHER)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps, [getattr(step, "error", None) for step in agent.memory.steps]


report(smolagents=version("smolagents"), openai=version("openai"))
