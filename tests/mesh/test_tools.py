"""Tools with the embedded model, as the official client sees them: what is asked for is what comes, both ways."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from jsonschema import validate
from openai import AsyncOpenAI, LengthFinishReasonError

from .test_up import up

MODEL = "penstock-mini"


def function(name: str, *, strict: bool | None = None, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    made: dict[str, Any] = {"name": name, "description": f"Does {name}.", "parameters": schema}
    return {"type": "function", "function": made | ({} if strict is None else {"strict": strict})}


WEATHER = function("get_weather", city={"type": "string", "enum": ["Oslo", "Rome"]}, days={"type": "integer"})
MAIL = function("send_mail", strict=True, to={"type": "string", "maxLength": 12}, urgent={"type": "boolean"})
TOOLS = [WEATHER, MAIL]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
QUESTIONS = [
    "What is the weather in Oslo?",
    "2+2?",
    "Write a haiku about rain.",
    "Mail Ann and look at the sky in Rome.",
]


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with up() as (_, _, url), AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def both(client: AsyncOpenAI, question: str, **options: Any) -> Any:
    """The answer, after it was the same both ways."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 200, **options}
    choice = (await client.chat.completions.create(**asked)).choices[0]
    try:
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    except LengthFinishReasonError as error:  # the client's own, where a tool is strict
        streamed = error.completion.choices[0]
    assert (choice.message.content or "") == (streamed.message.content or "")
    assert (choice.finish_reason, calls(choice)) == (streamed.finish_reason, calls(streamed))
    return choice


def calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def check(choice: Any) -> list[str]:
    """Names of the calls, whose arguments are what their schemas say."""
    for name, arguments in calls(choice):
        validate(json.loads(arguments), SCHEMAS[name])
    assert "tool_call" not in (choice.message.content or "")
    return [name for name, _ in calls(choice)]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "hot"])
async def test_required(client, question, sampling):
    choice = await both(client, question, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **sampling)
    assert len(check(choice)) == 1
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")


@pytest.mark.parametrize("question", QUESTIONS[:2])
async def test_named_and_allowed(client, question):
    named = {"type": "function", "function": {"name": "send_mail"}}
    choice = await both(client, question, tools=TOOLS, tool_choice=named, temperature=1.2, seed=3)
    assert (check(choice), choice.finish_reason) == (["send_mail"], "tool_calls")
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": only}
    options = {"tools": TOOLS, "tool_choice": allowed, "parallel_tool_calls": False}
    assert check(await both(client, question, temperature=1.2, seed=3, **options)) == ["get_weather"]


@pytest.mark.parametrize("question", QUESTIONS)
async def test_auto(client, question):
    choice = await both(client, question, tools=TOOLS, temperature=0.8, seed=11)
    if choice.finish_reason != "length":
        assert choice.finish_reason == ("tool_calls" if check(choice) else "stop")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none"])
async def test_no_marker_of_a_call_where_none_may_come(client, question, options):
    choice = await both(client, question, temperature=0, **options)
    assert calls(choice) == []
    assert "<tool_call>" not in choice.message.content


@pytest.mark.parametrize("most", [3, 8, 14, 20])
async def test_a_call_that_is_cut_is_no_call(client, most):
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": most}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    choice = (await client.chat.completions.create(**asked, **options)).choices[0]
    assert choice.finish_reason == "length"


async def test_a_turn_with_tools_to_its_end(client):
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    asked = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    first = await client.chat.completions.create(messages=messages, tool_choice="required", **asked)
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "It is 7 degrees."} for call in message.tool_calls]
    second = await client.chat.completions.create(messages=[*messages, *results], **asked)
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
