"""Where the time went: parts follow each other and add up, in usage, header and comment alike."""

from __future__ import annotations

import json

import httpx2
import pytest

from penstock.gateway.completing.timing import BEFORE_FIRST, PARTS, Marks, server_timing, times

from . import fakes

BODY = {"model": fakes.MODEL, "messages": [{"role": "user", "content": "hello"}]}


def adds_up(found):
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found[part] for part in PARTS) == pytest.approx(found["total"])
    assert sum(found[part] for part in BEFORE_FIRST) == pytest.approx(found["first_token"])
    return found


def parsed(header: str) -> dict[str, float]:
    """Milliseconds by name."""
    entries = (entry.strip().split(";") for entry in header.split(","))
    return {name: float(more[0].removeprefix("dur=")) for name, *more in entries}


def test_prefill_and_decode_apart():
    worker = {"queue": 0.1, "fetch": 0.2, "prefill": 0.4}
    marks = Marks(body=0.1, tokenize_s=0.2, planned=0.5, first=1.5, decoding=1.75, last=3.0, worker=worker)
    found = adds_up(times(marks, 3.25))
    assert found == pytest.approx(
        {
            "body": 0.1, "tokenize": 0.2, "plan": 0.2, "call": 0.3, "queue": 0.1, "fetch": 0.2, "prefill": 0.4,
            "handoff": 0.25, "decode": 1.25, "send": 0.25, "first_token": 1.5, "total": 3.25,
        }
    )  # fmt: skip


def test_one_worker_hands_nothing_off():
    found = adds_up(times(Marks(body=0.0, tokenize_s=0.0, planned=0.1, first=1.0, decoding=1.0, last=2.0), 2.0))
    assert (found["handoff"], found["decode"], found["send"]) == (0, 1, 0)


@pytest.mark.parametrize("decoding", [0.5, None, 9.0])
def test_marks_in_any_order(decoding):
    """Decode's token may come before prefill's, never, or behind the last that counted."""
    marks = Marks(body=0.1, tokenize_s=0.1, planned=0.3, first=1.0, decoding=decoding, last=2.0)
    adds_up(times(marks, 2.0))


def test_stages_that_ran_side_by_side_count_once():
    worker = {"queue": 5.0, "fetch": 0.5, "prefill": 0.8}
    found = adds_up(times(Marks(body=0.0, tokenize_s=0.0, planned=0.0, first=1.0, last=1.0, worker=worker), 1.0))
    assert (found["prefill"], found["queue"], found["call"]) == (0.8, 0.0, 0.0)
    assert found["fetch"] == pytest.approx(0.2)


def test_a_request_that_never_had_a_token():
    adds_up(times(Marks(body=0.1, tokenize_s=0.1), 4.0))
    adds_up(times(Marks(body=0.1, tokenize_s=0.1, planned=1.0), 4.0))


def test_the_header_says_milliseconds_and_tiers():
    said = server_timing({"fetch": 0.0125, "total": 1.0}, ("fetch", "total"), {"gpu": 0, "host": 32, "nvme": 16})
    assert said == 'fetch;dur=12.500;desc="host=32 nvme=16", total;dur=1000.000'


async def test_a_whole_answer(setup):
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{setup.url}/v1/chat/completions", json=BODY)
    header, own = parsed(answer.headers["server-timing"]), answer.json()["usage"]["penstock"]["times"]
    assert tuple(header) == (*PARTS, "total")
    assert {name: own[name] * 1e3 for name in header} == pytest.approx(header, abs=0.01)


async def test_a_stream(setup):
    """The header tells of the first token, a comment at the end of all, as does the chunk with the usage."""
    setup.script.cached = {"host": 8}
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{setup.url}/v1/chat/completions", json=body)
    assert tuple(parsed(answer.headers["server-timing"])) == (*BEFORE_FIRST, "first_token")
    *_, comment, usage, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    said = parsed(comment.removeprefix(": server-timing "))
    own = json.loads(usage.removeprefix("data: "))["usage"]["penstock"]["times"]
    assert {name: own[name] * 1e3 for name in said} == pytest.approx(said, abs=0.01)
    assert 'desc="host=8"' in comment
