"""Requests drawn from the table of bounds and from the types of the bodies: never a 500, and an error names a field."""

from __future__ import annotations

import asyncio
import json
import re

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.gateway.api import table
from penstock.gateway.api.fields import fields_of
from penstock.gateway.request import bounds
from penstock.gateway.request.bounds import BOUNDS, bound_of

from . import folding

pytestmark = pytest.mark.attack


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
CHAT, TEXT, RESPONSE, MESSAGE = PATHS
HELLO = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "hi"},
    RESPONSE: {"input": "hi"},
    MESSAGE: {"messages": HELLO, "max_tokens": 50},
}
WHOLE = [name for name in BOUNDS if "." not in name]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


TEXTS = st.sampled_from(["", "a", "f", "{}", "<|im_end|>", '{"a": 1}', "resp_0", "YQ=="])


def edges(name: str) -> st.SearchStrategy[float]:
    """Values at the bounds, just outside of them, far outside, and in between."""
    low, high = BOUNDS[name].low, BOUNDS[name].high
    near = [low - 1, low, low + 1, high - 1, high, high + 1, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, 1e300]
    return st.sampled_from([int(value) if float(value).is_integer() else value for value in near])


COUNTS = {
    "stop": st.integers(0, bounds.MAX_STOPS + 1).map(lambda count: ["s"] * count),
    "stop_sequences": st.integers(0, bounds.MAX_STOPS + 1).map(lambda count: ["s"] * count),
    "bad_words": st.integers(0, bounds.MAX_BAD_WORDS + 1).map(lambda count: ["s"] * count),
    "stop_token_ids": st.integers(0, bounds.MAX_STOP_TOKENS + 1).map(lambda count: [5] * count),
    "logit_bias": st.integers(0, bounds.MAX_LOGIT_BIAS + 1).map(lambda count: {str(at): 1 for at in range(count)}),
}
NUMBERS = st.fixed_dictionaries({}, optional={name: edges(name) for name in WHOLE if name != "logit_bias"} | COUNTS)


def junk(path: str) -> st.SearchStrategy[dict]:
    """Any JSON in any field."""
    names = sorted(fields_of(table.BODIES[path]).fates)
    return st.dictionaries(st.sampled_from(names), JSON, max_size=4)


@pytest.fixture
async def check(setup):
    """Sends a body from a thread and looks at the answer; at the end, whether the mesh is as before."""

    def send(path: str, body: dict) -> httpx2.Response:
        answer = client.post(path, json=body)
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code < 400:
            assert body.get("stream") or answer.json()["usage"]["penstock"]["computed_tokens"] >= 0
            return answer
        error, known = answer.json()["error"], {*fields_of(table.BODIES[path]).fates, *body}
        if path == MESSAGE:  # the field stands in the message
            assert re.match(r"\w+", error["message"])[0] in known, answer.text
        elif not error["param"]:
            assert error["code"] == "invalid_json", (body, answer.text)
        else:
            field = error["param"].partition(".")[0].partition("[")[0]
            assert field in error["message"] and field in known, answer.text
        return answer

    with httpx2.Client(base_url=setup.url, timeout=60) as client:
        yield send
    await setup.mesh.until(lambda: setup.mesh.live == 0)
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        for path in PATHS:
            assert (await client.post(path, json={"model": "tiny", **BASE[path]})).status_code == 200, "it serves on"


QUIET = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("path", PATHS)
async def test_numbers_at_their_bounds(check, path):
    @QUIET
    @given(NUMBERS)
    @example({"n": 16, "max_tokens": 2**31 - 1, "temperature": 100, "logprobs": True})
    @example({"seed": 2**64 - 1, "n": 2})
    def run(numbers: dict) -> None:
        known = fields_of(table.BODIES[path]).fates
        body = {"model": "tiny", **BASE[path], **{name: value for name, value in numbers.items() if name in known}}
        if path == CHAT and isinstance(body.get("logprobs"), int):
            body["logprobs"] = True
        answer = check(path, body)
        if answer.status_code == 200:
            for name, value in body.items():
                bound = bound_of(name, table.APIS.get(table.BODIES[path], ""))
                if bound is not None and not isinstance(value, bool | dict):
                    assert bound.low <= value <= bound.high

    await asyncio.to_thread(run)


@pytest.mark.parametrize("path", PATHS)
async def test_any_json_in_any_field(check, path):
    @QUIET
    @given(junk(path))
    def run(fields: dict) -> None:
        check(path, {"model": "tiny", **BASE[path], **fields})

    await asyncio.to_thread(run)


async def test_any_json_in_the_fields_of_messages_and_tools(check):
    messages, functions = (
        sorted(fields_of(kind).fates)
        for kind in (
            fields_of(table.BODIES[CHAT]).inner["messages"][0],
            fields_of(fields_of(table.BODIES[CHAT]).inner["tools"][0]).inner["function"][0],
        )
    )

    @QUIET
    @given(
        st.lists(st.dictionaries(st.sampled_from(messages), JSON, max_size=3), max_size=2),
        st.lists(st.dictionaries(st.sampled_from(functions), JSON, max_size=3), max_size=2),
    )
    def run(more: list[dict], tools: list[dict]) -> None:
        sent = [{"role": "user", "content": "hi", **fields} for fields in more] or HELLO
        body = {"model": "tiny", "messages": sent}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": "f", **fields}} for fields in tools]
        check(CHAT, body)

    await asyncio.to_thread(run)


@pytest.mark.parametrize(("path", "place"), [(RESPONSE, "input"), (MESSAGE, "messages")])
async def test_any_json_in_the_fields_of_items_blocks_and_tools(check, path, place):
    """Of types that are served, so that what is inside of them is read."""
    outer = fields_of(table.BODIES[path]).inner
    item, [tool] = outer[place][0], outer["tools"]
    part = fields_of(item).inner["content"][0]
    kinds = st.sampled_from(
        ["message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text", "text"]
        if path == RESPONSE
        else ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"]
    )

    def some(kind: type) -> st.SearchStrategy[dict]:
        names = sorted(fields_of(kind).fates)
        typed = {"type": kinds, "role": st.sampled_from(["user", "assistant", "system", "developer"])}
        values = {name: typed.get(name, TEXTS | JSON) for name in names if name != "content" or kind is part}
        return st.fixed_dictionaries({}, optional=values)

    @QUIET
    @given(st.lists(some(item), max_size=2), st.lists(some(part), max_size=2), st.lists(some(tool), max_size=2))
    def run(items: list[dict], parts: list[dict], tools: list[dict]) -> None:
        body = {"model": "tiny", **BASE[path], place: [*items, {"role": "user", "content": parts}]}
        check(path, body | ({"tools": tools} if tools else {}))

    await asyncio.to_thread(run)


FOLDS = {CHAT: folding.completion, TEXT: folding.completion, RESPONSE: folding.response, MESSAGE: folding.message}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  "Tromsø"}}\n</tool_call>'
SAID = st.lists(
    st.sampled_from(
        [CALL, "\n", "<think>hm</think>", "word ", "é中😀", " stop here", '{"name": "f"', "<tool_call>", "}"]
    ),
    max_size=6,
).map("".join)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
OPTIONS: dict[str, dict[str, st.SearchStrategy]] = {
    CHAT: {
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 40),
        "stop": st.sampled_from(["stop", ["é", "here"]]),
        "logprobs": st.booleans(),
        "tools": st.just([{"type": "function", "function": FUNCTION}]),
        "response_format": st.just({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
        "bad_words": st.just(["fox"]),
        "truncate_prompt_tokens": st.sampled_from([3, -1]),
    },
    TEXT: {
        "prompt": st.sampled_from([["a", "b"], [5, 6], "text"]),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 40),
        "stop": st.sampled_from(["stop", ["é", "here"]]),
        "logprobs": st.integers(0, 2),
        "include_stop_str_in_output": st.booleans(),
    },
    RESPONSE: {
        "max_output_tokens": st.integers(1, 40),
        "tools": st.just([{"type": "function", **FUNCTION}]),
        "text": st.just({"format": FORMAT}),
        "include": st.just(["reasoning.encrypted_content"]),
        "truncation": st.just("auto"),
        "store": st.booleans(),
    },
    MESSAGE: {
        "max_tokens": st.integers(1, 40),
        "stop_sequences": st.sampled_from([["stop"], ["é", "here"]]),
        "tools": st.just([{"name": "f", "input_schema": FUNCTION["parameters"]}]),
        "output_config": st.just({"format": {"type": "json_schema", "schema": SCHEMA}}),
        "messages": st.just([*HELLO, {"role": "assistant", "content": "Well, "}]),
    },
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_the_whole(setup, check, path):
    """Whatever the model says, in whatever pieces, wherever it is cut."""

    @QUIET
    @given(SAID, st.fixed_dictionaries({}, optional=OPTIONS[path]), st.integers(1, 5))
    def run(text: str, options: dict, batch: int) -> None:
        setup.says(text)
        setup.script.batch = batch
        body = {"model": "tiny", **BASE[path], **({"seed": 1} if path in (CHAT, TEXT) else {}), **options}
        usage = {"stream_options": {"include_usage": True}} if path in (CHAT, TEXT) else {}
        whole = check(path, body).json()
        streamed = check(path, {**body, "stream": True, **usage})
        built = FOLDS[path](folding.events_of(streamed))
        expected = folding.whole_completion(whole) if path in (CHAT, TEXT) else whole
        stopped = not {"stop", "stop_sequences"}.isdisjoint(options)
        assert folding.plain(built, stopped=stopped) == folding.plain(expected, stopped=stopped)

    await asyncio.to_thread(run)


@pytest.mark.parametrize("depth", [bounds.MAX_DEPTH - 9, bounds.MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("place", ["metadata", "tools", "nothing"])
async def test_nesting_is_bounded(setup, depth, place):
    """Also where nobody looks inside, and where a template would."""
    nested = "[" * depth + "]" * depth
    body = json.dumps({"model": "tiny", **BASE[CHAT]})[:-1]
    parts = {
        "metadata": f', "metadata": {nested}}}',
        "tools": f', "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {nested}}}}}}}]}}',
        "nothing": f', "nothing": {nested}}}',
    }
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        answer = await client.post(CHAT, content=body + parts[place])
    assert (answer.status_code == 200) == (depth < bounds.MAX_DEPTH and place != "nothing"), answer.text
    assert answer.status_code in (200, 400)


async def test_headers_are_counted(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        for many, status in ((bounds.MAX_HEADERS - 10, 200), (bounds.MAX_HEADERS + 1, 431)):
            headers = [(f"x-{at}", "y") for at in range(many)]
            assert (await client.get("/healthz", headers=headers)).status_code == status
