"""Tools with the embedded model, as the official client sees them: what is asked for is what comes, both ways."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from jsonschema import validate
from openai import AsyncOpenAI, LengthFinishReasonError
from tests.services.gateway import folding

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


FORM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
CHOICES = {"auto": "auto", "required": "any", "none": "none"}
"""In the words of OpenAI and of Anthropic."""


def of_chat(question: str, choice: str, parallel: bool) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM, "strict": True}}
    own = {"tool_choice": choice, "parallel_tool_calls": parallel, "response_format": form, "max_tokens": 150}
    return "chat/completions", {"messages": [{"role": "user", "content": question}], "tools": TOOLS, **own}


def of_responses(question: str, choice: str, parallel: bool) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    form = {"format": {"type": "json_schema", "name": "form", "schema": FORM, "strict": True}}
    own = {"tool_choice": choice, "parallel_tool_calls": parallel, "text": form, "max_output_tokens": 150}
    return "responses", {"input": question, "tools": tools, **own}


def of_messages(question: str, choice: str, parallel: bool) -> tuple[str, dict[str, Any]]:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    chosen: dict[str, Any] = {"type": CHOICES[choice]}
    if choice != "none":
        chosen["disable_parallel_tool_use"] = not parallel
    own = {"tool_choice": chosen, "output_config": {"format": {"type": "json_schema", "schema": FORM}}}
    return "messages", {"messages": [{"role": "user", "content": question}], "max_tokens": 150, "tools": tools, **own}


def said(answer: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], bool]:
    """Text, calls, and whether the answer was cut, in any of the APIs."""
    if "choices" in answer:
        [choice] = answer["choices"].values()
        functions = [call["function"] for call in choice["said"].get("tool_calls", [])]
        found = [(function["name"], function["arguments"]) for function in functions]
        cut = choice["finish_reason"] == "length"
        text = choice["said"]["content"]
    elif "output" in answer:
        items = answer["output"]
        found = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
        cut = answer["status"] == "incomplete"
    else:
        found = [
            (block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"
        ]
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        cut = answer["stop_reason"] == "max_tokens"
    return text, [] if cut else [(name, json.loads(arguments)) for name, arguments in found], cut


@pytest.mark.parametrize("api", [of_chat, of_responses, of_messages])
@pytest.mark.parametrize("choice", CHOICES)
async def test_a_form_beside_tools(client, api, choice):
    """An answer is calls, each by its function's schema, or else a text of the form: as a whole and as a stream."""
    kinds = set()
    async with httpx2.AsyncClient(base_url=str(client.base_url), timeout=60) as raw:
        for question, parallel in ((QUESTIONS[0], True), (QUESTIONS[1], False)):
            path, asked = api(question, choice, parallel)
            asked |= {"model": MODEL, "temperature": 0}
            whole = (await raw.post(path, json=asked)).json()
            usage = {"stream_options": {"include_usage": True}} if api is of_chat else {}
            events = folding.events_of(await raw.post(path, json={**asked, "stream": True, **usage}))
            fold = {of_chat: folding.completion, of_responses: folding.response, of_messages: folding.message}[api]
            text, found, cut = said(fold(events))
            assert said(folding.whole_completion(whole) if api is of_chat else whole) == (text, found, cut)
            for name, arguments in found:
                validate(arguments, SCHEMAS[name])
            if cut:
                continue
            assert bool(found) != bool(text.strip()), "calls, or text"
            if not found:
                validate(json.loads(text), FORM)
            assert len(found) <= (9 if parallel else 1)
            kinds.add(bool(found))
    assert choice == "auto" or kinds <= {choice == "required"}
