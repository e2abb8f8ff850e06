"""A stream that has broken off is gone on with: each text once, wherever it broke, at whichever gateway."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest

from penstock.errors import Refused
from penstock.gateway.completing.completion import Caller
from penstock.gateway.completing.delta import Delta
from penstock.gateway.completing.repeating import RepeatKey, identified, place_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.door.answering import generating, inquiry_of
from penstock.gateway.service import open_gateway

from . import fakes

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": fakes.MODEL, "messages": HELLO, "stream": True, "max_tokens": 200},
    TEXT: {"model": fakes.MODEL, "prompt": "hello", "stream": True, "max_tokens": 200},
    MESSAGES: {"model": fakes.MODEL, "messages": HELLO, "stream": True, "max_tokens": 200},
    RESPONSES: {"model": fakes.MODEL, "input": "hello", "stream": True, "max_output_tokens": 200},
}
KEY = {"idempotency-key": "k-1"}
SAID = (
    'The quick <think>brown</think> fox. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
)
LOOKED = SAID + '\n<tool_call>{"name": "get_weather", "arguments": {"city": "Bergen"}}</tool_call>'
THOUGHT = "<think>the fox is brown</think>The quick brown fox."
JSON = '{"name": "Oslo"}'
TOOL = {"name": "get_weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BUILDING = {
    "text": (RESPONSES, "The quick brown fox.", {}),
    "nothing": (RESPONSES, "", {}),
    "a part": (RESPONSES, "The quick brown fox.", {"max_output_tokens": 4}),
    "reasoning": (RESPONSES, THOUGHT, {"include": ["reasoning.encrypted_content"]}),
    "logprobs": (RESPONSES, THOUGHT, {"top_logprobs": 2}),
    "calls": (RESPONSES, LOOKED, {"tools": [TOOL | {"type": "function", "strict": False}]}),
    "structured": (RESPONSES, JSON, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    "a message": (MESSAGES, "The quick brown fox.", {}),
    "a message's reasoning": (MESSAGES, THOUGHT, {}),
    "a message's calls": (MESSAGES, LOOKED, {"tools": [{"name": "get_weather", "input_schema": {"type": "object"}}]}),
    "a message's stop": (MESSAGES, "The quick brown fox.", {"stop_sequences": ["fox"]}),
}
"""Streams whose events build on each other."""
_OF_THE_RUN = ("created_at", "completed_at", "times", "session", "drafts", "drafted_tokens", "accepted_tokens")


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


@pytest.fixture
async def elsewhere(setup, model_dir):
    """A client of another gateway before the same mesh."""
    config = GatewayConfig(router=setup.mesh.address, model_dir=model_dir, http_address="127.0.0.1:0", drain_s=0.2)
    async with open_gateway(config) as gateway:
        await gateway.ready()
        async with httpx2.AsyncClient(base_url=f"http://{gateway.address}") as client:
            yield client


def data(event: str) -> Any:
    """What an event says, without what is told of the run and not of the answer."""
    line = next(line[6:] for line in event.splitlines() if line.startswith("data: "))
    return line if line == "[DONE]" else _lasting(json.loads(line))


def _lasting(value: Any) -> Any:
    if isinstance(value, list):
        return [_lasting(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _lasting(item) for name, item in value.items() if name not in _OF_THE_RUN}


@pytest.mark.parametrize(("path", "choices"), [(CHAT, 1), (CHAT, 2), (TEXT, 1), (TEXT, 2)])
async def test_wherever_a_stream_breaks_off_the_rest_follows(setup, http, elsewhere, path, choices):
    setup.says(SAID)
    body = BODIES[path] | ({"n": choices} if choices > 1 else {}) | ({"tools": TOOLS} if path == CHAT else {})
    whole = await stream(http, path, body)
    places = [number for number, id in enumerate(ids(whole)) if id]
    assert len(places) > 10
    for place in places:
        rest = await stream(elsewhere, path, body, **{"last-event-id": ids(whole)[place]})
        both = whole[: place + 1] + rest
        assert said(both) == said(whole), f"after event {place}"
        assert both[-1].endswith("data: [DONE]")
        assert finishes(both) == finishes(whole), f"after event {place}"


def finishes(events: list[str]) -> list[tuple[int, str]]:
    """How choices ended."""
    choices = [choice for event in map(data, events) if event != "[DONE]" for choice in event.get("choices", ())]
    return sorted((choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"])


@pytest.mark.parametrize("ends", [{"stop": ["fox jumps"]}, {"stop": ["fox"]}, {"max_tokens": 5}, {"n": 2}])
async def test_text_and_end_of_a_choice_are_told_once_each(setup, http, elsewhere, ends):
    """At the end of an answer comes what might have become a stop string; in chunks of one delta."""
    setup.says("The quick brown fox")
    body = BODIES[CHAT] | ends
    whole = await stream(http, CHAT, body)
    assert sum(map(bool, ids(whole))) >= len(whole) - 2 - body.get("n", 1), "all but a role of its own and [DONE]"
    for place, id in enumerate(ids(whole)):
        rest = await stream(elsewhere, CHAT, body, **({"last-event-id": id} if id else {}))
        both = (whole[: place + 1] if id else []) + rest
        assert (said(both), finishes(both)) == (said(whole), finishes(whole)), f"after event {place}"


@pytest.mark.parametrize("kind", BUILDING)
async def test_events_that_build_on_each_other_come_once_each(setup, http, elsewhere, kind):
    """After each event the rest is what the undisturbed stream had: items, their ids and those of calls, numbers."""
    path, text, fields = BUILDING[kind]
    setup.says(text)
    body = BODIES[path] | fields
    whole = await stream(http, path, body)
    expected = [data(event) for event in whole]
    assert all(ids(whole)) and len(whole) >= 6
    if path == RESPONSES:
        assert [event["sequence_number"] for event in expected] == [*range(len(whole))]
    setup.script.batch = 3  # tokens come in other company
    for place, id in enumerate(ids(whole)):
        rest = await stream(elsewhere, path, body, **{"last-event-id": id})
        assert [data(event) for event in rest] == expected[place + 1 :], f"after event {place}"
        assert ids(rest) == ids(whole)[place + 1 :]


@pytest.mark.parametrize("path", BODIES)
async def test_events_that_are_counted_are_not_merged_for_a_slow_reader(setup, path):
    reception = setup.gateway.reception
    api = generating(reception)[path]
    ask = (await inquiry_of(reception, api, json.dumps(BODIES[path]).encode(), "tenant")).ask
    repeat = RepeatKey(bytes(32), counts=api.style.counts)
    caller = Caller(tenant="tenant", session="", request_id="slow", began=time.perf_counter(), repeat=repeat)
    async with reception.models.open(ask, caller) as completion, asyncio.timeout(10):
        while not completion.choices[0].finish:
            await asyncio.sleep(0)
        deltas, tokens = await completion.outbox.next(), completion.usage().completion_tokens
    assert "".join(delta.content for delta in deltas) == "The quick brown fox."
    assert len(deltas) == (1 if path in (CHAT, TEXT) else tokens)


async def test_a_response_that_was_gone_on_with_is_stored_whole(setup, http, elsewhere):
    whole = await stream(http, RESPONSES, BODIES[RESPONSES])
    await stream(elsewhere, RESPONSES, BODIES[RESPONSES], **{"last-event-id": ids(whole)[4]})
    last = data(whole[-1])["response"]
    kept = await elsewhere.get(f"{RESPONSES}/{last['id']}")
    assert kept.status_code == 200 and _lasting(kept.json()) == last


async def test_a_stream_that_failed_is_gone_on_with_from_before_the_failure(opened):
    async with opened(request_timeout_s=0.5) as setup, httpx2.AsyncClient(base_url=setup.url) as http:
        setup.script.hang = True
        failed = await stream(http, RESPONSES, BODIES[RESPONSES])
        told = sum(map(bool, ids(failed)))
        assert told > 2 and all(ids(failed)[:told])
        kinds = [data(event)["type"] for event in failed[told:]]
        assert kinds[-2:] == ["error", "response.failed"], "these are no places of the answer"
        setup.script.hang = False
        rest = await stream(http, RESPONSES, BODIES[RESPONSES], **{"last-event-id": ids(failed)[told - 1]})
        whole = await stream(http, RESPONSES, BODIES[RESPONSES])
        assert [data(event) for event in failed[:told] + rest] == [data(event) for event in whole]


async def test_a_client_that_hears_of_events_that_it_has_is_pinged_meanwhile(opened):
    async with opened(first_ping_s=0.05, ping_s=0.05) as setup, httpx2.AsyncClient(base_url=setup.url) as http:
        whole = await stream(http, RESPONSES, BODIES[RESPONSES])
        setup.script.pace_s = 0.03
        headers = KEY | {"last-event-id": ids(whole)[-1]}
        answer = await http.post(RESPONSES, json=BODIES[RESPONSES], headers=headers)
        assert ": ping" in answer.text and "data: " not in answer.text


async def test_calls_of_a_repeated_request_have_the_same_ids_everywhere(setup, http, elsewhere):
    setup.says(LOOKED)
    body = BODIES[CHAT] | {"stream": False, "tools": TOOLS}

    async def calls(client: httpx2.AsyncClient, **headers: str) -> list[str]:
        message = (await client.post(CHAT, json=body, headers=headers)).json()["choices"][0]["message"]
        return [call["id"] for call in message["tool_calls"]]

    named = await calls(http, **KEY)
    assert named == await calls(elsewhere, **KEY) and len(set(named)) == 2
    others = [*await calls(http), *await calls(http), *await calls(http, **{"idempotency-key": "k-2"})]
    assert len({*named, *others}) == 8


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


@pytest.mark.parametrize("path", BODIES)
async def test_a_place_that_the_answer_does_not_have_is_refused(setup, http, path):
    whole = await stream(http, path, BODIES[path])
    [*_, last] = filter(None, ids(whole))
    tag, _, count = last.partition("-")
    for beyond in (f"{tag}-{int(count) + 1}", f"{tag}-999999999", f"{tag}-{count}.{count}", f"{tag[::-1]}-{count}"):
        answer = await http.post(path, json=BODIES[path], headers=KEY | {"last-event-id": beyond})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 409 and message.startswith(f"last-event-id = {beyond!r}: "), message
        assert message.endswith("; send the id of an event of this request's stream, or none")
    rest = await stream(http, path, BODIES[path], **{"last-event-id": last})
    assert not said(rest)


async def test_an_event_of_another_api_is_refused(setup, http):
    """Its ids count other events; and the prompts are the same."""
    [*_, response] = ids(await stream(http, RESPONSES, BODIES[RESPONSES]))
    [*_, message] = ids(await stream(http, MESSAGES, BODIES[MESSAGES]))
    [*_, chunk] = filter(None, ids(await stream(http, CHAT, BODIES[CHAT])))
    for path, id in ((RESPONSES, message), (RESPONSES, chunk), (MESSAGES, response), (CHAT, response)):
        answer = await http.post(path, json=BODIES[path], headers=KEY | {"last-event-id": id})
        assert answer.status_code == 409 and "another request" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
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
async def test_what_is_wrong_is_named(http, path, headers, body, field):
    answer = await http.post(path, json=BODIES[path] | body, headers=headers)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(field if field == "idempotency-key" else f"{field} = {headers[field]!r}: ")


async def test_the_official_client_reads_a_stream_with_ids(setup):
    setup.says("The quick brown fox.")
    asked = await setup.client.chat.completions.create(
        model=fakes.MODEL, messages=HELLO, stream=True, extra_headers=KEY | {"x-penstock-explain": "plan"}
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in asked]) == "The quick brown fox."
    events = await setup.client.responses.create(model=fakes.MODEL, input="hello", stream=True, extra_headers=KEY)
    assert [event.response.output_text async for event in events if event.type == "response.completed"] == [
        "The quick brown fox."
    ]


def test_the_last_event_gets_the_id():
    one, two, comment = b"data: 1\n\n", b"event: e\ndata: 2\n\n", b": plan\n"
    assert identified(one, "i") == b"id: i\ndata: 1\n\n"
    assert identified(one + two, "i") == b"data: 1\n\nevent: e\nid: i\ndata: 2\n\n"
    assert identified(comment + one, "i") == b": plan\nid: i\ndata: 1\n\n"


def test_the_end_is_told_again_without_its_text():
    tag = place_of(RepeatKey(bytes(32)), b"x" * 32, 2).tag
    for had, content in ((3, " end"), (4, ""), (5, "")):
        place = place_of(RepeatKey(bytes(32), f"{tag}-{had}.0"), b"x" * 32, 2)
        last = place.last(Delta(0, " end", finish="stop", upto=5))
        missed = place.missed.get(0, Delta(0)).content
        assert (last.content, last.finish, content + missed) == (content, "stop", " end")
        assert place.has(last) == (had == 5)
    place = place_of(RepeatKey(bytes(32), f"{tag}-6.0"), b"x" * 32, 2)
    with pytest.raises(Refused, match="choice 0 of this answer ends with 5"):
        place.last(Delta(0, " end", finish="stop", upto=5))
