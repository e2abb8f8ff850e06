"""Parts of bodies that their decoder passes over: what is wrong inside of them is refused by name."""

from __future__ import annotations

import json

import httpx2
import pytest

from penstock.errors import InvalidRequest
from penstock.gateway.api.openai.batch_bodies import read_batch

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": "tiny", "input": "hi"}
LARGE, NO_TEXT = b"1e999", b'"\xff"'
CALLED = b'{"model": "tiny", "max_tokens": 9, "messages": [{"role": "assistant", "content": [HERE]}]}'
USED = b'{"type": "tool_use", "id": "c", "name": "f", "input": {"a": RAW}}'


def sent(body: dict, name: str, raw: bytes) -> bytes:
    return json.dumps(body).encode()[:-1] + b', "' + name.encode() + b'": ' + raw + b"}"


async def refused(setup, path: str, content: bytes) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        answer = await client.post(path, content=content)
    assert answer.status_code == 400, answer.text
    return answer


@pytest.mark.parametrize("raw", [LARGE, NO_TEXT])
@pytest.mark.parametrize(
    ("path", "body", "name", "form", "field"),
    [
        ("/v1/chat/completions", CHAT, "prompt_logprobs", b"RAW", "prompt_logprobs"),
        ("/v1/chat/completions", CHAT, "tool_choice", b'{"a": RAW}', "tool_choice"),
        ("/v1/responses", RESPONSE, "tool_choice", b'{"type": "auto", "a": RAW}', "tool_choice"),
        ("/v1/responses", RESPONSE, "text", b'{"format": {"type": "text", "description": RAW}}', "text.format"),
    ],
)
async def test_raw_values_are_refused_by_name(setup, raw, path, body, name, form, field):
    answer = await refused(setup, path, sent(body, name, form.replace(b"RAW", raw)))
    error = answer.json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("name", "form", "field"),
    [
        ("guided_json", b'{"title": RAW}', "guided_json"),
        ("guided_choice", b"[RAW]", "guided_choice"),
        ("structured_outputs", b'{"choice": [RAW]}', "structured_outputs.choice"),
        ("structured_outputs", b'{"json": {"title": RAW}}', "structured_outputs.json"),
    ],
)
async def test_constraints_that_are_no_text_are_refused_by_name(setup, name, form, field):
    answer = await refused(setup, "/v1/chat/completions", sent(CHAT, name, form.replace(b"RAW", NO_TEXT)))
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("raw", [LARGE, NO_TEXT])
async def test_inputs_of_calls_are_refused_by_name(setup, raw, path):
    content = CALLED.replace(b"HERE", USED.replace(b"RAW", raw))
    if path.endswith("count_tokens"):
        content = content.replace(b'"max_tokens": 9, ', b"")
    answer = await refused(setup, path, content)
    assert answer.json()["error"]["message"].startswith("messages[0].content[0].input: is not valid JSON")


@pytest.mark.parametrize("end", [b', "a": 1e999}', b', "a": "\xff"}', b', "a": [}', b""])
def test_what_is_behind_an_ignored_field_is_read_too(end):
    with pytest.raises(InvalidRequest, match="not valid") as caught:
        read_batch(b'{"unknown": 1' + end, [])
    assert caught.value.code == "invalid_json"


def test_a_complaint_does_not_repeat_a_long_value():
    body = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}
    body["output_expires_after"] = {"anchor": "x" * 100_000, "seconds": 3600}
    with pytest.raises(InvalidRequest) as caught:
        read_batch(json.dumps(body).encode())
    assert caught.value.field == "output_expires_after.anchor" and len(caught.value.message) < 1000
