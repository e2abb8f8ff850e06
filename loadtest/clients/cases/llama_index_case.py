"""llama-index through its OpenAI-like model. It reads a tool's annotations, so they are no strings here."""

import asyncio
from importlib.metadata import version

from case import ENDLESS, KEY, MODEL, URL, WEATHER, City, case, leaving, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

LLM = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=300,
    temperature=0,
    max_retries=0,
    context_window=8192,
)
CALLED: list[str] = []


class Place(BaseModel):
    """A place."""

    city: City


def get_weather(city: City) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return "7 degrees, rain"


TOOL = FunctionTool.from_defaults(get_weather)


@case
async def chat():
    assert (await LLM.achat([ChatMessage(role="user", content="Hello!")])).message.content


@case
async def stream():
    assert [each.delta async for each in await LLM.astream_chat([ChatMessage(role="user", content="Hello!")])]


@case
async def tools():
    answer = await LLM.achat_with_tools([TOOL], user_msg=WEATHER, tool_required=True)
    [call] = LLM.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather"
    CALLED.clear()
    await FunctionAgent(tools=[TOOL], llm=LLM, streaming=True).run(WEATHER, max_iterations=4)
    assert CALLED


@case
async def cancel():
    """Of the task that reads the stream: closing the stream leaves its connection open."""
    llm = LLM.model_copy(update={"max_tokens": None, "additional_kwargs": {"extra_body": ENDLESS}})

    async def read(first: asyncio.Event):
        async for _ in await llm.astream_chat([ChatMessage(role="user", content="Hello!")]):
            first.set()

    async with leaving():
        first = asyncio.Event()
        reader = asyncio.ensure_future(read(first))
        await first.wait()
        reader.cancel()
        await asyncio.wait([reader])


@case
async def structured():
    answer = await LLM.as_structured_llm(Place).achat([ChatMessage(role="user", content="Which city? Oslo")])
    assert isinstance(answer.raw, Place)


report(llama_index=version("llama-index-llms-openai-like"), openai=version("openai"))
