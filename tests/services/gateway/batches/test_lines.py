"""The lines of a batch: how a file becomes lines, what may be wrong with one, and what is written of it."""

from __future__ import annotations

import json

import pytest

from penstock.errors import Unprocessable
from penstock.gateway.api.openai.shapes import error_json
from penstock.gateway.batches.lines import (
    BatchLine,
    LineReader,
    LineTooLong,
    answered,
    expired,
    recorded,
    split,
)
from penstock.gateway.batches.records import LineFault, LinesUsage

from .helpers import ENDPOINT, line, pieces, stored_batch


async def numbered(*data: bytes, most: int = 1000):
    return [one async for page in split(pieces(*data), most) for one in page]


async def test_lines_have_numbers_however_they_arrive():
    text = "\ufeff{a}\r\n\n  \n{ü}\nlast".encode()
    expected = [(1, b"{a}"), (4, "{ü}".encode()), (5, b"last")]
    assert await numbered(text) == expected
    assert await numbered(*(text[at : at + 1] for at in range(len(text)))) == expected
    assert await numbered(b"") == [] and await numbered(b"\n\n") == []


async def test_a_line_that_is_too_long_is_not_kept_in_memory():
    taken = 0

    async def endless():
        nonlocal taken
        yield b"short\n"
        while True:
            taken += 1000
            yield b"x" * 1000

    with pytest.raises(LineTooLong) as caught:
        async for _ in split(endless(), 10_000):
            pass
    assert caught.value.number == 2 and taken < 20_000


def read(*lines, endpoint=ENDPOINT):
    reader = LineReader(endpoint, lambda model: None if model == "tiny" else f"{model} is not here")
    return [
        reader.read(at, one if isinstance(one, bytes) else json.dumps(one).encode()) for at, one in enumerate(lines, 1)
    ]


def test_a_line_is_what_its_client_wrote():
    body = {"model": "tiny", "prompt": "ü", "temperature": 0.1, "nested": [1e300, "\u2028"]}
    [found] = read({"body": body, "url": ENDPOINT, "method": "POST", "custom_id": "a", "more": 1})
    assert isinstance(found, BatchLine) and (found.number, found.custom_id, found.model) == (1, "a", "tiny")
    assert json.loads(found.body) == body


@pytest.mark.parametrize(
    ("bad", "code", "param", "says"),
    [
        (b"{", "invalid_json_line", None, "the line is not valid JSON: Input data was truncated"),
        (b"[1]", "invalid_request", None, "Expected `object`, got `array`"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, "the line is not valid JSON: "),
        (b'{"body": ' + b"[" * 100_000, "invalid_json_line", None, "the line is not valid JSON: "),
        ({**line("a"), "custom_id": 5}, "invalid_request", "custom_id", "custom_id: Expected `str`, got `int`"),
        ({**line("a"), "custom_id": ""}, "invalid_custom_id", "custom_id", "must have 1 to 512 characters, not 0"),
        ({**line("a"), "custom_id": "x" * 513}, "invalid_custom_id", "custom_id", "1 to 512 characters, not 513"),
        ({"method": "POST", "url": ENDPOINT, "body": {}}, "invalid_request", "custom_id", "custom_id: is required"),
        ({**line("a"), "method": "GET"}, "invalid_method", "method", "method: must be POST, not 'GET'"),
        (
            {**line("a"), "url": "/v1/x"},
            "invalid_url",
            "url",
            "must be /v1/completions, the endpoint of the batch, not",
        ),
        ({**line("a"), "body": "text"}, "invalid_request", "body", "body: Expected `object`, got `str`"),
        ({**line("a"), "body": {"prompt": "hi"}}, "invalid_request", "body.model", "body.model: is required"),
        (line("a", body={"stream": True}), "invalid_request", "body.stream", "body.stream: must not be true"),
        (line("a", body={"model": "other"}), "model_not_found", "body.model", "body.model: other is not here"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(bad, code, param, says):
    fine, found = read(line("fine"), bad)
    assert isinstance(fine, BatchLine)
    assert isinstance(found, LineFault) and (found.line, found.code, found.param) == (2, code, param)
    assert says in found.message, found.message


def test_two_lines_of_one_name_are_both_named():
    _, _, found = read(line("a"), line("b"), line("a"))
    assert found.code == "duplicate_custom_id" and found.line == 3 and "line 1" in found.message


def test_the_model_of_a_batch_is_that_of_all_its_lines():
    reader = LineReader(ENDPOINT, lambda model: None)
    assert reader.model is None
    for at, model in enumerate(("x", "x", "y"), 1):
        reader.read(at, json.dumps(line(str(at), body={"model": model})).encode())
        assert reader.model == (None if model == "y" else "x")


def test_results_are_written_as_openai_has_them_and_read_again():
    batch, one = stored_batch(id="batch_" + "0" * 24), BatchLine(7, "mine", b"{}", "tiny")
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}, "penstock": {}}
    good = answered(batch, one, 200, {"id": "cmpl-1", "usage": usage})
    assert json.loads(good.written) == {
        "id": f"batch_req_{'0' * 24}_7",
        "custom_id": "mine",
        "response": {
            "status_code": 200,
            "request_id": f"batch_req_{'0' * 24}_7",
            "body": {"id": "cmpl-1", "usage": usage},
        },
        "error": None,
    }
    assert good.ok and good.usage == LinesUsage(5, 4, 2, 0) and good.written.endswith(b"\n")
    assert recorded(good.written.strip(), True) == (
        good.__class__(good.custom_id, True, good.written.strip(), good.usage)
    )
    bad = answered(batch, one, 422, error_json(Unprocessable("no", field="prompt")))
    assert not bad.ok and json.loads(bad.written)["response"]["status_code"] == 422
    late = json.loads(expired(batch, one).written)
    assert late["response"] is None and late["error"]["code"] == "batch_expired"
    responses = {"usage": {"input_tokens": 3, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}}}
    assert answered(batch, one, 200, responses).usage == LinesUsage(3, 0, 2, 1)
