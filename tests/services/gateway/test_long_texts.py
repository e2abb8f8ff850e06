"""Long strings are taken out of a body and come back: the same value as of a decoder that does all in one go."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.gateway.api.long_texts import SLICE, LongTexts
from penstock.gateway.api.reader import BodyReader

TEXT = st.text(
    st.one_of(st.sampled_from('\\"/\n\t a中é😀\x7f'), st.characters(exclude_categories=["Cs"])), max_size=300
)
VALUE = st.recursive(
    st.one_of(TEXT, st.integers(-9, 9), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
)


def decoded(raw: bytes, size: int) -> Any:
    texts = LongTexts(raw, size)
    return texts.put_back(msgspec.json.decode(texts.rest))


@given(VALUE, st.booleans(), st.sampled_from([None, 1]), st.integers(16, 40))
def test_the_same_value(value: Any, ascii: bool, indent: int | None, size: int) -> None:
    raw = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    assert decoded(raw, size) == value


@given(
    st.lists(
        st.sampled_from([b'"', b"\\", b"\\u00e9", b"\\ud83d", b"\\ude00", b" ", b":", b"a" * 40, b"\xe4", b"\x00"])
    )
)
def test_what_is_not_json_stays_so(parts: list[bytes]) -> None:
    raw = b'{"a": "' + b"".join(parts) + b'", "b": 1}'
    try:
        expected = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            decoded(raw, 16)
    else:
        assert decoded(raw, 16) == expected


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    texts: list[str] = []
    raw: msgspec.Raw = msgspec.Raw()
    values: dict[str, Any] = {}


class Outer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    inner: Inner
    number: int = 0
    kind: str | list[str] = ""


LONG = "中😀" * SLICE


def test_wherever_a_body_has_them() -> None:
    whole = {"inner": {"texts": ["a", LONG], "raw": [LONG, "b"], "values": {"c": [LONG], LONG: 1}}, "kind": LONG}
    found = BodyReader(Outer).read(json.dumps(whole).encode())
    assert (found.inner.texts, found.inner.values, found.kind) == (["a", LONG], {"c": [LONG], LONG: 1}, LONG)
    assert msgspec.json.decode(found.inner.raw) == [LONG, "b"]


def test_they_are_taken_out_in_fact() -> None:
    raw = json.dumps({"a": LONG, "b": "short"}, ensure_ascii=False).encode()
    texts = LongTexts(raw)
    assert len(texts.rest) < 100 and texts.put_back(msgspec.json.decode(texts.rest)) == {"a": LONG, "b": "short"}
    assert LongTexts(b'{"a": "short"}').rest == b'{"a": "short"}'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (json.dumps({"inner": {}, "number": LONG}), "number: Expected `int`, got `str`"),
        (json.dumps({"inner": {}, "kind": LONG}).replace("\\ud83d", "\\q", 1), "not valid JSON"),
        (json.dumps({"inner": {}, "kind": LONG}) + "x", "not valid JSON"),
        (json.dumps({"inner": {}, "kind": "a" * 3 * SLICE})[:-2], "not valid JSON"),
    ],
)
def test_what_is_wrong_is_named(raw: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BodyReader(Outer).read(raw.encode())


def test_bytes_that_are_no_text() -> None:
    raw = json.dumps({"inner": {}, "kind": "é" * 2 * SLICE}, ensure_ascii=False).encode()
    for wrong in (raw.replace(b"\xc3", b"\xff", 1), raw.replace(b"\xc3\xa9", b"\xa9" * 40, 1)):
        with pytest.raises(InvalidRequest, match="not valid UTF-8"):
            BodyReader(Outer).read(wrong)
