"""Requests drawn from the table of bounds and from the types of the bodies: never a 500, and an error names a field."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.gateway.api import table
from penstock.gateway.api.fields import fields_of
from penstock.gateway.request import bounds
from penstock.gateway.request.bounds import BOUNDS

PATHS = ("/v1/chat/completions", "/v1/completions")
BASE = {PATHS[0]: {"messages": [{"role": "user", "content": "hi"}]}, PATHS[1]: {"prompt": "hi"}}
WHOLE = [name for name in BOUNDS if "." not in name]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def edges(name: str) -> st.SearchStrategy[float]:
    """Values at the bounds, just outside of them, far outside, and in between."""
    low, high = BOUNDS[name].low, BOUNDS[name].high
    near = [low - 1, low, low + 1, high - 1, high, high + 1, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, 1e300]
    return st.sampled_from([int(value) if float(value).is_integer() else value for value in near])


COUNTS = {
    "stop": st.integers(0, bounds.MAX_STOPS + 1).map(lambda count: ["s"] * count),
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
    """Sends a body by a thread's own client and looks at the answer."""

    def send(path: str, body: dict) -> httpx2.Response:
        with httpx2.Client(base_url=setup.url) as client:
            answer = client.post(path, json=body)
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code >= 400 and not answer.json()["error"]["param"]:
            assert answer.json()["error"]["code"] == "invalid_json", (body, answer.text)
        elif answer.status_code >= 400:
            error = answer.json()["error"]
            field = error["param"].partition(".")[0].partition("[")[0]
            assert field in error["message"] and field in {*fields_of(table.BODIES[path]).fates, *body}, answer.text
        else:
            assert body.get("stream") or answer.json()["usage"]["completion_tokens"] >= 0
        return answer

    return send


QUIET = settings(
    max_examples=120,
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
        if path == PATHS[0] and isinstance(body.get("logprobs"), int):
            body["logprobs"] = True
        answer = check(path, body)
        if answer.status_code == 200:
            for name, value in body.items():
                if name in BOUNDS and not isinstance(value, bool | dict):
                    assert BOUNDS[name].low <= value <= BOUNDS[name].high

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
            fields_of(table.BODIES[PATHS[0]]).inner["messages"][0],
            fields_of(fields_of(table.BODIES[PATHS[0]]).inner["tools"][0]).inner["function"][0],
        )
    )

    @QUIET
    @given(
        st.lists(st.dictionaries(st.sampled_from(messages), JSON, max_size=3), max_size=2),
        st.lists(st.dictionaries(st.sampled_from(functions), JSON, max_size=3), max_size=2),
    )
    def run(more: list[dict], tools: list[dict]) -> None:
        sent = [{"role": "user", "content": "hi", **fields} for fields in more] or BASE[PATHS[0]]["messages"]
        body = {"model": "tiny", "messages": sent}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": "f", **fields}} for fields in tools]
        check(PATHS[0], body)

    await asyncio.to_thread(run)


@pytest.mark.parametrize("depth", [bounds.MAX_DEPTH - 9, bounds.MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("place", ["metadata", "tools", "nothing"])
async def test_nesting_is_bounded(setup, depth, place):
    """Also where nobody looks inside, and where a template would."""
    nested = "[" * depth + "]" * depth
    body = json.dumps({"model": "tiny", **BASE[PATHS[0]]})[:-1]
    parts = {
        "metadata": f', "metadata": {nested}}}',
        "tools": f', "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {nested}}}}}}}]}}',
        "nothing": f', "nothing": {nested}}}',
    }
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        answer = await client.post(PATHS[0], content=body + parts[place])
    assert (answer.status_code == 200) == (depth < bounds.MAX_DEPTH and place != "nothing"), answer.text
    assert answer.status_code in (200, 400)


async def test_headers_are_counted(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        for many, status in ((bounds.MAX_HEADERS - 10, 200), (bounds.MAX_HEADERS + 1, 431)):
            headers = [(f"x-{at}", "y") for at in range(many)]
            assert (await client.get("/healthz", headers=headers)).status_code == status
