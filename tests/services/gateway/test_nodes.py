"""How much there is in JSON, counted without decoding it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.gateway.api import nodes
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.request.bounds import MAX_ESCAPES, MAX_ITEMS, MAX_MESSAGES, MAX_NODES

TEXT = st.text(st.sampled_from('"\\{}[],: aé\n'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def count(value: object) -> tuple[int, int]:
    """(objects, arrays and members; commas), as a reader counts them."""
    if isinstance(value, list | dict):
        inner = [count(item) for item in (value.values() if isinstance(value, dict) else value)]
        own = 1 + (len(value) if isinstance(value, dict) else 0)
        return own + sum(found for found, _ in inner), max(len(value) - 1, 0) + sum(commas for _, commas in inner)
    return 0, 0


@given(VALUES, st.integers(1, 9), st.booleans())
def test_it_counts_what_there_is(value, size, ascii_only):
    counter = Nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "_SLICE", size)
        counter.add(json.dumps(value, ensure_ascii=ascii_only).encode())
    assert (counter._nodes, counter._items) == count(value)


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(depth, inner), default=0) + isinstance(value, list | dict)


@given(VALUES, st.integers(1, 9), st.integers(0, 6))
def test_it_knows_how_deep_it_is(value, size, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "_SLICE", size)
        patch.setattr(nodes, "MAX_DEPTH", most)
        raw = json.dumps(value).encode()
        if depth(value) <= most:
            Nodes().add(raw)
        else:
            with pytest.raises(InvalidRequest, match="inside each other"):
                Nodes().add(raw)


def test_it_adds_up_and_names_the_place():
    counter = Nodes()
    counter.add(b"[]," * MAX_NODES)
    with pytest.raises(InvalidRequest, match=r"tools\[1\]: more than") as raised:
        counter.add(b"[", "tools[1]")
    assert (raised.value.field, raised.value.code) == ("tools[1]", "request_too_complex")
    with pytest.raises(InvalidRequest, match="values"):
        Nodes().add(b"," * (MAX_ITEMS + 1))
    with pytest.raises(InvalidRequest, match="escaped characters"):
        Nodes().add(b'"' + rb"\n" * (MAX_ESCAPES + 1) + b'"')


def test_as_many_messages_as_are_served_have_room():
    message = {"role": "user", "content": 'if (a["b"]) { return [1, 2, 3]; }', "name": "x"}
    Nodes().add(json.dumps({"messages": [message] * MAX_MESSAGES}).encode())
