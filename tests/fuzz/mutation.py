"""Inputs made of kept ones: cut, spliced, repeated, flipped, with numbers at bounds and words of the parser's language.

Half of the changes are blind, for parsers of bytes and for what tokenizers of texts do; the other half exchange whole
words and numbers, so that what comes out is often well-formed and gets past the first line of checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

LONGEST = 1 << 16
"""Bytes of an input: enough for what takes quadratic time to show."""
_MOST_CHANGES = 4
_TIMES = (2, 3, 10, 100, 1_000, 5_000)
_WORD = re.compile(rb'"(?:[^"\\\n]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?')
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_EDGES = (0, 1, -1, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63)
NUMBERS = (*(b"%d" % edge for edge in (*_EDGES, 2**64, -(2**63))), b"0.5", b"1e308", b"1e999", b"-0.0", b"9" * 400)
ANYWHERE = (b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b"\x00", b"\xff", b"\xc3\xa9", b"\xf0\x9f\x8e\x89")
"""Words of no language, and of all."""


@dataclass(frozen=True)
class Stock:
    """What inputs are made of."""

    seeds: Sequence[bytes]
    words: Sequence[bytes]


def mutated(seeds: Sequence[bytes], words: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of `seeds` after some changes, at most LONGEST bytes; `words` are those of the parser's language."""
    return _mutated(Stock(seeds, (*words, *ANYWHERE)))


@st.composite
def _mutated(draw, stock: Stock) -> bytes:
    data = draw(st.sampled_from(stock.seeds))
    for change in draw(st.lists(st.sampled_from(_CHANGES), min_size=1, max_size=_MOST_CHANGES)):
        data = change(draw, data, stock)[:LONGEST]
    return data


def _span(draw, data: bytes) -> tuple[int, int]:
    begin = draw(st.integers(0, len(data)))
    length = draw(st.integers(0, min(len(data) - begin, 64)) | st.just(len(data) - begin))
    return begin, begin + length


def _cut(draw, data: bytes, stock: Stock) -> bytes:
    begin, end = _span(draw, data)
    return data[:begin] + data[end:]


def _splice(draw, data: bytes, stock: Stock) -> bytes:
    other = draw(st.sampled_from(stock.seeds))
    return data[: draw(st.integers(0, len(data)))] + other[draw(st.integers(0, len(other))) :]


def _repeat(draw, data: bytes, stock: Stock) -> bytes:
    begin, end = _span(draw, data)
    return data[:begin] + data[begin:end] * draw(st.sampled_from(_TIMES)) + data[end:]


def _flip(draw, data: bytes, stock: Stock) -> bytes:
    if not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]


def _insert(draw, data: bytes, stock: Stock) -> bytes:
    at, word = draw(st.integers(0, len(data))), draw(st.sampled_from(stock.words))
    return data[:at] + word * draw(st.sampled_from((1, 1, 1, *_TIMES))) + data[at:]


def _number(draw, data: bytes, stock: Stock) -> bytes:
    return _exchange(draw, data, _NUMBER, NUMBERS)


def _binary(draw, data: bytes, stock: Stock) -> bytes:
    """A number at its bounds as bytes, over what stands there."""
    size, order = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from(("little", "big")))
    value = draw(st.sampled_from(_EDGES)) % (1 << 8 * size)
    at = draw(st.integers(0, len(data)))
    return data[:at] + value.to_bytes(size, order) + data[at + size :]


def _word(draw, data: bytes, stock: Stock) -> bytes:
    return _exchange(draw, data, _WORD, stock.words)


def _exchange(draw, data: bytes, pattern: re.Pattern[bytes], others: Sequence[bytes]) -> bytes:
    """One match replaced by another text, or by one of another place."""
    places = [match.span() for match in pattern.finditer(data)]
    if not places:
        return data
    begin, end = draw(st.sampled_from(places))
    own = [data[slice(*draw(st.sampled_from(places)))]]
    return data[:begin] + draw(st.sampled_from((*own, *others))) + data[end:]


_CHANGES = (_cut, _splice, _repeat, _flip, _insert, _number, _binary, _word, _word, _number, _insert)
