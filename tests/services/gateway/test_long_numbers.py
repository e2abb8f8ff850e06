"""Long lists of numbers in JSON, against a decoder that makes all of it at once."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.gateway.api.long_numbers import LongNumbers
from penstock.gateway.api.openai.tokenizing import read_detokenize


def read(raw: bytes, size: int) -> dict:
    numbers = LongNumbers(raw, size)
    found = msgspec.json.decode(numbers.rest)
    found["tokens"] = numbers.put_back(found["tokens"])
    return found


BLANK = st.sampled_from(["", "", " ", "\n\t ", " " * 9])


@given(st.lists(st.tuples(BLANK, st.integers(0, 10**6), BLANK), max_size=40), st.text(max_size=9), st.integers(1, 16))
def test_they_are_those_of_a_decoder(items, text, size):
    body = f'{{"a": {json.dumps(text)}, "tokens": [{",".join(f"{a}{n}{b}" for a, n, b in items)}], "b": 1}}'
    assert read(body.encode(), size) == json.loads(body)


@given(st.text(st.sampled_from('12, .-e[]"a'), max_size=60), st.integers(1, 8))
@example("1," * 20, 4)
@example("1," * 20 + ",1", 4)
@example("1,2,3,4,5,6,7,01,9,1,2,3,4,5,6", 4)
def test_what_no_decoder_takes_is_not_taken(items, size):
    body = f'{{"tokens": [{items}]}}'.encode()
    try:
        right = msgspec.json.decode(body, type=dict[str, list[int]])
    except msgspec.DecodeError:
        with pytest.raises(msgspec.DecodeError):
            msgspec.convert(read(body, size), dict[str, list[int]])
    else:
        assert read(body, size) == right


def test_nothing_is_taken_out_of_what_is_no_long_list():
    for raw in (b"", b"{}", b'{"tokens": [1, 2]}', b"1" * 100, b'"' + b"," * 100 + b'"'):
        numbers = LongNumbers(raw, 64)
        assert numbers.put_back([1]) == [1]
        assert len(numbers.rest) <= len(raw)


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ("7," * 200_000 + "1.5", "tokens"),
        ("7," * 200_000 + "1.5," + "7," * 200_000 + "7", "tokens"),
        ("7," * 99_999, "JSON"),
    ],
)
def test_a_long_list_that_is_wrong_is_refused_by_name(tokens, what):
    with pytest.raises(InvalidRequest, match=what):
        read_detokenize(b'{"tokens": [' + tokens.encode() + b"]}")


def test_a_long_list_is_read():
    ids = [*range(300_000)]
    assert read_detokenize(json.dumps({"model": "m", "tokens": ids}).encode()).tokens == ids
