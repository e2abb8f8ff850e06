"""Every field of the schemas does what docs/fields.md says of it, and no other field passes unseen."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import httpx2
import msgspec
import pytest
from anthropic import types as anthropic_types
from anthropic.types import message_create_params, system_message_param, user_message_param
from openai.types import chat as openai_chat
from openai.types import completion_create_params, shared_params
from openai.types import responses as openai_responses
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_input_item_param

from penstock.gateway.api import anthropic, responses, table
from penstock.gateway.api.anthropic.bodies import MessagesBody
from penstock.gateway.api.fields import Fate, fields_of
from penstock.gateway.api.openai import bodies
from penstock.gateway.api.responses.bodies import ResponseBody

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASE = {
    CHAT: {"model": "tiny", "messages": HELLO},
    TEXT: {"model": "tiny", "prompt": "hi"},
    RESPONSE: {"model": "tiny", "input": "hi"},
    MESSAGE: {"model": "tiny", "messages": HELLO, "max_tokens": 50},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def post(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:

        async def send(path: str, **fields):
            return await client.post(path, json={**BASE[path], **fields})

        yield send


def fates(kind: str) -> list[tuple[str, str, Fate]]:
    return [
        (path, name, fate)
        for path, body in table.BODIES.items()
        for name, fate in fields_of(body).fates.items()
        if fate.kind == kind
    ]


def test_the_document_is_made_from_the_types():
    assert Path("docs/fields.md").read_text() == table.document()


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (bodies.ChatBody, chat_create_params.CompletionCreateParamsBase),
        (bodies.ChatBody, chat_create_params.CompletionCreateParamsStreaming),
        (bodies.CompletionBody, completion_create_params.CompletionCreateParamsBase),
        (bodies.StreamOptions, openai_chat.ChatCompletionStreamOptionsParam),
        (bodies.MessageBody, openai_chat.ChatCompletionAssistantMessageParam),
        (bodies.MessageBody, openai_chat.ChatCompletionUserMessageParam),
        (bodies.MessageBody, openai_chat.ChatCompletionSystemMessageParam),
        (bodies.MessageBody, openai_chat.ChatCompletionDeveloperMessageParam),
        (bodies.MessageBody, openai_chat.ChatCompletionToolMessageParam),
        (bodies.ContentPart, openai_chat.ChatCompletionContentPartTextParam),
        (bodies.ContentPart, openai_chat.ChatCompletionContentPartRefusalParam),
        (bodies.ContentPart, openai_chat.ChatCompletionContentPartImageParam),
        (bodies.ContentPart, openai_chat.ChatCompletionContentPartInputAudioParam),
        (bodies.ToolCallBody, openai_chat.ChatCompletionMessageFunctionToolCallParam),
        (bodies.ToolBody, openai_chat.ChatCompletionFunctionToolParam),
        (bodies.FunctionBody, shared_params.FunctionDefinition),
        (bodies.MessageBody, openai_chat.ChatCompletionMessage),
        (ResponseBody, response_create_params.ResponseCreateParamsBase),
        (ResponseBody, response_create_params.ResponseCreateParamsStreaming),
        (responses.bodies.TextBody, openai_responses.ResponseTextConfigParam),
        (responses.bodies.ReasoningBody, shared_params.Reasoning),
        (responses.bodies.ResponseStreamOptions, response_create_params.StreamOptions),
        (responses.bodies.InputItem, openai_responses.EasyInputMessageParam),
        (responses.bodies.InputItem, openai_responses.ResponseOutputMessageParam),
        (responses.bodies.InputItem, openai_responses.ResponseReasoningItemParam),
        (responses.bodies.InputItem, openai_responses.ResponseFunctionToolCall),
        (responses.bodies.InputItem, response_input_item_param.FunctionCallOutput),
        (responses.bodies.InputPart, openai_responses.ResponseInputTextParam),
        (responses.bodies.InputPart, openai_responses.ResponseInputImageParam),
        (responses.bodies.InputPart, openai_responses.ResponseInputFileParam),
        (responses.bodies.InputPart, openai_responses.ResponseOutputTextParam),
        (responses.bodies.FunctionToolBody, openai_responses.FunctionTool),
        (MessagesBody, message_create_params.MessageCreateParamsBase),
        (MessagesBody, message_create_params.MessageCreateParamsStreaming),
        (anthropic.bodies.CountBody, anthropic_types.MessageCountTokensParams),
        (anthropic.bodies.CustomToolBody, anthropic_types.ToolParam),
        (anthropic.bodies.ContentBlock, anthropic_types.TextBlockParam),
        (anthropic.bodies.ContentBlock, anthropic_types.ImageBlockParam),
        (anthropic.bodies.ContentBlock, anthropic_types.DocumentBlockParam),
        (anthropic.bodies.ContentBlock, anthropic_types.ThinkingBlockParam),
        (anthropic.bodies.ContentBlock, anthropic_types.RedactedThinkingBlockParam),
        (anthropic.bodies.ContentBlock, anthropic_types.ToolUseBlockParam),
        (anthropic.bodies.ContentBlock, anthropic_types.ToolResultBlockParam),
        (anthropic.bodies.TurnBody, user_message_param.UserMessageParam),
        (anthropic.bodies.TurnBody, system_message_param.SystemMessageParam),
        (anthropic.bodies.ToolChoiceBody, anthropic_types.ToolChoiceToolParam),
        (anthropic.bodies.OutputBody, anthropic_types.OutputConfigParam),
        (anthropic.bodies.PromptMetadata, anthropic_types.MetadataParam),
    ],
)
def test_every_field_of_the_apis_types_is_decided(body, theirs):
    names = getattr(theirs, "model_fields", None) or typing.get_type_hints(theirs)
    assert {*names} <= {*fields_of(body).fates}


def test_every_type_of_body_forbids_what_it_does_not_know():
    for path in table.BODIES.values():
        waiting = [path]
        while waiting:
            body = waiting.pop()
            assert body.__struct_config__.forbid_unknown_fields, body
            waiting += [inner for kinds in fields_of(body).inner.values() for inner in kinds]


def said(answer: httpx2.Response) -> object:
    """What the model said, in any API."""
    body = answer.json()
    items = body.get("output", ())
    return body.get("choices") or body.get("content") or [(item["type"], item["content"]) for item in items]


@pytest.mark.parametrize("path", BASE)
async def test_null_is_absent(post, path):
    body = table.BODIES[path]
    needed = {"input"} if path == RESPONSE else set()
    absent = {field.name: None for field in msgspec.structs.fields(body) if not field.required}
    absent = {name: None for name in absent if name not in needed}
    assert len(absent) > (60 if path in (CHAT, TEXT) else 20)
    assert (await post(path, **absent)).status_code == 200
    for name in absent:
        assert (await post(path, **{name: None})).status_code == 200, name


async def test_null_is_absent_inside(post):
    def all_null(body: type[msgspec.Struct]) -> dict:
        return {field.name: None for field in msgspec.structs.fields(body) if not field.required}

    part = {**all_null(bodies.ContentPart), "type": "text", "text": "x"}
    call = {**all_null(bodies.ToolCallBody), "id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {**all_null(bodies.MessageBody), "role": "user", "content": [part]},
        {**all_null(bodies.MessageBody), "role": "assistant", "tool_calls": [call]},
        {**all_null(bodies.MessageBody), "role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    function = {**all_null(bodies.FunctionBody), "name": "f"}
    answer = await post(
        CHAT,
        messages=messages,
        tools=[{"type": "function", "function": function}],
        stream=True,
        stream_options=all_null(bodies.StreamOptions),
        penstock={"retain": None, "session": {"ended": None, "returns_in": None}},
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "name", "fate"), fates("accepted"))
async def test_accepted_fields_are_not_read(post, path, name, fate):
    plain = said(await post(path))
    for value in ("x", 7, {"a": [1]}, [{}], True):
        answer = await post(path, **{name: value})
        assert answer.status_code == 200, answer.text
        assert said(answer) == plain


@pytest.mark.parametrize(("path", "name", "fate"), fates("refused"))
async def test_refused_fields_are_named_unless_they_ask_for_nothing(post, path, name, fate):
    for value in ("?", 12345, {"a": [1]}, [{"b": 2}], True):
        answer = await post(path, **{name: value})
        if json.dumps(value) in fate.fine:
            assert answer.status_code == 200
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error.get("param", name)) == (400, name)
        assert error["message"].startswith(name)
    for fine in fate.fine:
        assert (await post(path, **{name: json.loads(fine)})).status_code == 200, fine


@pytest.mark.parametrize(
    ("path", "fields", "field", "meant"),
    [
        (CHAT, {"temprature": 1}, "temprature", "temperature"),
        (CHAT, {"max_completion_token": 1}, "max_completion_token", "max_completion_tokens"),
        (TEXT, {"stop_sequences": []}, "stop_sequences", None),
        (CHAT, {"nonsense": None}, "nonsense", None),
        (CHAT, {"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages", "usage"),
        (CHAT, {"messages": [{**HELLO[0], "contents": 1}]}, "messages[0].contents", "content"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "texts": "a"}]}]},
            "messages[1].content[0].texts",
            "text",
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parametrs": {}}}]},
            "tools[0].function.parametrs",
            "parameters",
        ),
        (CHAT, {"penstock": {"retian": 5}}, "penstock.retian", "retain"),
        (CHAT, {"q" * 10_000: 1}, "q" * 64, None),
    ],
)
async def test_unknown_fields_are_named_with_the_nearest_known_one(post, path, fields, field, meant):
    answer = await post(path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unknown_parameter")
    assert (meant is None) == ("did you mean" not in error["message"])
    assert meant is None or meant in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_may_be_a_warning_instead(opened, stream):
    async with opened(unknown_fields="warn") as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        body = {
            **BASE[CHAT],
            "stream": stream,
            "temprature": {"a": 1},
            "new\r\nx-evil: 1": 1,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "mood": 1}], "kind": "a"}],
            "tools": [{**TOOL, "extra": []}],
        }
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        ignored = answer.headers["x-penstock-ignored-fields"].split(", ")
        inner = {"messages[0].kind", "messages[0].content[0].mood", "tools[0].extra"}
        assert {*ignored} == {"temprature", "new??x-evil??1", *inner}
        assert "x-evil" not in answer.headers
        assert "x-penstock-ignored-fields" not in (await client.post(CHAT, json=BASE[CHAT])).headers
        wrong = await client.post(CHAT, json={**body, "temperature": "hot"})
        assert wrong.json()["error"]["param"] == "temperature"


async def test_messages_as_the_official_clients_send_them_back(setup, post):
    setup.says("fine")
    answer = await setup.client.chat.completions.create(model="tiny", messages=HELLO)
    spoken = {**answer.choices[0].message.model_dump(), "annotations": [], "audio": None, "function_call": None}
    called = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{**CALL, "index": 0}]}
    refused = {"role": "assistant", "content": None, "refusal": "I must not"}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I may not"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "x", "name": "f"}
    messages = [*HELLO, spoken, *HELLO, called, result, *HELLO, refused, *HELLO, part, *HELLO]
    assert (await post(CHAT, messages=messages)).status_code == 200
    prompt = setup.tokenizer.decode([*setup.mesh.prefills[0].requests[-1].prompt_ids])
    assert "I must not" in prompt and "I may not" in prompt


async def test_a_byte_order_mark_is_no_part_of_the_body(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        assert (await client.post(CHAT, content=b"\xef\xbb\xbf" + json.dumps(BASE[CHAT]).encode())).status_code == 200


@pytest.mark.parametrize("value", [5, 5.0])
async def test_integers_are_written_as_integers(post, value):
    answer = await post(CHAT, max_tokens=value)
    assert (answer.status_code == 200) == isinstance(value, int)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 0), ("top_k", 2**40), ("seed", 2**70)])
async def test_bounds_are_written_as_numbers(post, name, value):
    message = (await post(CHAT, **{name: value})).json()["error"]["message"]
    assert "e+" not in message
