"""langchain-openai, and LangGraph on it."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version

from case import ENDLESS, HISTORY, KEY, MODEL, SESSION, URL, WEATHER, City, case, leaving, report
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel

CALLED: list[str] = []


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, **{"max_tokens": 300, "temperature": 0, **more}
    )


class Place(BaseModel):
    """A place."""

    city: City


@tool
def get_weather(city: City) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return "7 degrees, rain"


@case
async def chat():
    first = await model().ainvoke("Hello!")
    assert first.content and first.usage_metadata["total_tokens"]
    assert (await model().ainvoke([HumanMessage("Hello!"), first, HumanMessage("And again?")])).content


@case
async def stream():
    whole = None
    async for chunk in model(stream_usage=True).astream("Hello!"):
        whole = chunk if whole is None else whole + chunk
    assert whole.content and whole.usage_metadata["output_tokens"]


@case
async def tools():
    for choice in ("any", "get_weather"):
        bound = model().bind_tools([get_weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
        answer = await bound.ainvoke(WEATHER)
        [call] = answer.tool_calls
        assert call["name"] == "get_weather"
        result = ToolMessage("7 degrees, rain", tool_call_id=call["id"])
        assert isinstance(
            await model().bind_tools([get_weather]).ainvoke([HumanMessage(WEATHER), answer, result]), AIMessage
        )


@case
async def structured():
    for method in ("json_schema", "function_calling"):
        found = await model().with_structured_output(Place, method=method).ainvoke("Which city? Oslo")
        assert isinstance(found, Place)


@case
async def json_object():
    """Any object, which a small model may fill to the limit, or with other names than it was asked for."""
    asked = model().with_structured_output(Place, method="json_mode", include_raw=True)
    try:
        found = await asked.ainvoke('Answer in JSON: {"city": "Oslo"}')
        json.loads(found["raw"].content)
    except LengthFinishReasonError:
        pass


@case
async def langgraph():
    from langgraph.prebuilt import create_react_agent

    CALLED.clear()
    agent = create_react_agent(model(), [get_weather])
    result = await agent.ainvoke({"messages": [HumanMessage(WEATHER)]}, {"recursion_limit": 8})
    assert CALLED and result["messages"][-1].content is not None


@case
async def second_turn_is_cached():
    asked = model(max_tokens=20, default_headers=SESSION)
    first = await asked.ainvoke(HISTORY)
    second = await asked.ainvoke([HumanMessage(HISTORY), first, HumanMessage("And then?")])
    cached = [each.usage_metadata["input_token_details"]["cache_read"] for each in (first, second)]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    async with leaving():
        stream = model(max_tokens=None, extra_body=ENDLESS).astream("Hello!")
        async for _ in stream:
            break
        await stream.aclose()


@case
async def eight_at_once():
    assert all(
        each.content is not None
        for each in await asyncio.gather(*(model(max_tokens=20).ainvoke("Hi") for _ in range(8)))
    )


report(langchain_openai=version("langchain-openai"), langgraph=version("langgraph"), openai=version("openai"))
