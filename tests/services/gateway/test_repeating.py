"""A stream that has broken off is gone on with: each text once, wherever it broke, at whichever gateway."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from penstock.gateway.completing.delta import Delta
from penstock.gateway.completing.repeating import RepeatKey, identified, resume_point

from . import fakes

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": fakes.MODEL, "messages": HELLO, "stream": True, "max_tokens": 200},
    TEXT: {"model": fakes.MODEL, "prompt": "hello", "stream": True, "max_tokens": 200},
    MESSAGES: {"model": fakes.MODEL, "messages": HELLO, "stream": True, "max_tokens": 200},
}
KEY = {"idempotency-key": "k-1"}
SAID = (
    'The quick <think>brown</think> fox. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


async def stream(http: httpx2.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    """The events of a stream, with what stands before their data."""
    answer = await http.post(path, json=body, headers=KEY | headers)
    assert answer.status_code == 200, answer.text
    events = [event for event in answer.text.split("\n\n") if event]
    assert all("data: " in event for event in events), "no comment stands alone"
    return events


def ids(events: list[str]) -> list[str]:
    """Of each event; empty: it has none."""
    return [next((line[4:] for line in event.splitlines() if line.startswith("id: ")), "") for event in events]


def said(events: list[str]) -> dict[Any, str]:
    """All texts of an answer, by choice and kind."""
    found: dict[Any, str] = {}
    for event in events:
        data = next(line[6:] for line in event.splitlines() if line.startswith("data: "))
        for place, text in _texts({} if data == "[DONE]" else json.loads(data)):
            found[place] = found.get(place, "") + text
    return found


def _texts(event: dict[str, Any]) -> list[tuple[Any, str]]:
    found = []
    for choice in event.get("choices", ()):
        delta, number = choice.get("delta", {}), choice["index"]
        found += [((number, kind), delta.get(kind) or "") for kind in ("content", "reasoning_content", "role")]
        found += [((number, "text"), choice.get("text") or "")]
        for call in delta.get("tool_calls") or ():
            found += [
                ((number, call["index"], kind), call["function"].get(kind) or "") for kind in ("name", "arguments")
            ]
    if event.get("type") == "content_block_delta":
        delta = event["delta"]
        text = delta.get("text") or delta.get("partial_json") or delta.get("thinking")
        found.append(((event["index"], delta["type"]), text))
    if event.get("type") == "content_block_start":
        found.append(((event["index"], "start"), "|"))
    return [(place, text) for place, text in found if text]


@pytest.fixture
async def http(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        yield client


@pytest.mark.parametrize(("path", "choices"), [(CHAT, 1), (CHAT, 2), (TEXT, 1), (TEXT, 2), (MESSAGES, 1)])
async def test_wherever_a_stream_breaks_off_the_rest_follows(setup, http, path, choices):
    setup.says(SAID)
    body = BODIES[path] | ({"n": choices} if choices > 1 else {}) | ({"tools": TOOLS} if path == CHAT else {})
    whole = await stream(http, path, body)
    places = [number for number, id in enumerate(ids(whole)) if id]
    assert len(places) > 10
    for place in places:
        rest = await stream(http, path, body, **{"last-event-id": ids(whole)[place]})
        both = said(whole[: place + 1] + rest)
        assert both == said(whole), f"after event {place}"


async def test_a_repeated_request_has_the_same_id_and_seed_everywhere(setup, http):
    body = BODIES[CHAT] | {"stream": False, "temperature": 1}
    first, again = [await http.post(CHAT, json=body, headers=KEY) for _ in range(2)]
    other = await http.post(CHAT, json=body, headers={"idempotency-key": "k-2"})
    plain = await http.post(CHAT, json=body)
    assert first.json()["id"] == again.json()["id"]
    assert first.headers["x-penstock-seed"] == again.headers["x-penstock-seed"]
    assert len({answer.json()["id"] for answer in (first, other, plain)}) == 3
    assert len({answer.headers["x-penstock-seed"] for answer in (first, other, plain)}) == 3
    named = await http.post(CHAT, json=body | {"seed": 7}, headers=KEY)
    assert named.headers["x-penstock-seed"] == "7"
    requests = [request.request_id for worker in setup.mesh.decodes for request in worker.requests]
    assert len(set(requests)) == len(requests), "each run is one of its own to the workers"


async def test_the_prompt_does_not_depend_on_what_the_gateway_remembers(setup, http):
    """Answers may have other tokens than their text: another gateway, which has not seen them, could not go on."""
    letters = [id for letter in "the quick fox" for id in setup.ids(letter)]
    assert letters != setup.ids("the quick fox")
    setup.script.say = lambda request: letters
    body, session = BODIES[CHAT] | {"stream": False}, {"x-session-affinity": "remembered"}
    said = (await http.post(CHAT, json=body, headers=session)).json()["choices"][0]["message"]["content"]
    body["messages"] = [*HELLO, {"role": "assistant", "content": said}, *HELLO]

    async def prompt(**headers: str) -> list[int]:
        assert (await http.post(CHAT, json=body, headers=headers)).status_code == 200
        return list(setup.mesh.decodes[0].requests[-1].prompt_ids)

    known, named = await prompt(**session), await prompt(**session, **KEY)
    assert named == await prompt(**{"x-session-affinity": "new"}) != known


async def test_a_stream_without_a_key_has_no_ids(http):
    answer = await http.post(CHAT, json=BODIES[CHAT])
    assert "id: " not in answer.text


async def test_an_event_of_another_request_is_refused(setup, http):
    [*_, last] = [id for id in ids(await stream(http, CHAT, BODIES[CHAT])) if id]
    for body in (
        BODIES[CHAT] | {"messages": [{"role": "user", "content": "hello!"}]},
        BODIES[CHAT] | {"temperature": 0.5},
        BODIES[CHAT] | {"n": 2},
        BODIES[CHAT] | {"stop": ["fox"]},
    ):
        answer = await http.post(CHAT, json=body, headers=KEY | {"last-event-id": last})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_resumable")
    other = await http.post(CHAT, json=BODIES[CHAT], headers={"idempotency-key": "k-2", "last-event-id": last})
    assert other.status_code == 409


@pytest.mark.parametrize(
    ("headers", "body", "field"),
    [
        ({"last-event-id": "0123456789ab-1"}, {}, "last-event-id"),
        (KEY | {"last-event-id": "17"}, {}, "last-event-id"),
        (KEY | {"last-event-id": "0123456789ab-1"}, {"stream": False}, "last-event-id"),
        ({"idempotency-key": "x" * 256}, {}, "idempotency-key"),
        ({"idempotency-key": ""}, {}, "idempotency-key"),
    ],
)
async def test_what_is_wrong_is_named(http, headers, body, field):
    answer = await http.post(CHAT, json=BODIES[CHAT] | body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field)


async def test_responses_go_on_in_their_own_way(http):
    body = {"model": fakes.MODEL, "input": "hello", "stream": True}
    assert "id: " not in (await http.post("/v1/responses", json=body, headers=KEY)).text
    answer = await http.post("/v1/responses", json=body, headers=KEY | {"last-event-id": "0123456789ab-1"})
    assert answer.status_code == 400


async def test_the_official_client_reads_a_stream_with_ids(setup):
    setup.says("The quick brown fox.")
    asked = await setup.client.chat.completions.create(
        model=fakes.MODEL, messages=HELLO, stream=True, extra_headers=KEY | {"x-penstock-explain": "plan"}
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in asked]) == "The quick brown fox."


def test_the_last_event_gets_the_id():
    one, two, comment = b"data: 1\n\n", b"event: e\ndata: 2\n\n", b": plan\n"
    assert identified(one, "i") == b"id: i\ndata: 1\n\n"
    assert identified(one + two, "i") == b"data: 1\n\nevent: e\nid: i\ndata: 2\n\n"
    assert identified(comment + one, "i") == b": plan\nid: i\ndata: 1\n\n"


def test_the_end_is_told_again_without_its_text():
    key = RepeatKey(bytes(32))
    tag = resume_point(key, [b"x"], 2).tag
    for had, content in ((3, " end"), (4, "")):
        point = resume_point(RepeatKey(bytes(32), f"{tag}-{had}.0"), [b"x"], 2)
        last = point.last(Delta(0, " end", finish="stop", upto=4))
        missed = point.missed.get(0, Delta(0)).content
        assert (last.content, last.finish, content + missed) == (content, "stop", " end")


async def test_calls_of_a_repeated_request_have_the_same_ids(setup, http):
    setup.says(SAID)
    body = BODIES[CHAT] | {"stream": False, "tools": TOOLS}

    async def call(**headers: str) -> str:
        message = (await http.post(CHAT, json=body, headers=headers)).json()["choices"][0]["message"]
        return message["tool_calls"][0]["id"]

    named = await call(**KEY)
    assert named == await call(**KEY)
    assert len({named, await call(), await call(), await call(**{"idempotency-key": "k-2"})}) == 4
