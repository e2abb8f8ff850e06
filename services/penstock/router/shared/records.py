"""What routers tell each other, and its bytes. Whatever is read was written by somebody else: each field is checked.

MessagePack; first the number of the format, so that a router never takes what an older or newer one means otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

FORMAT = 1
_HEADER = b"PS%d:" % FORMAT
_STAMP = 13
"""Digits of a time in milliseconds."""

_Name: TypeAlias = Annotated[str, Meta(max_length=512)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 48)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
_Factor: TypeAlias = Annotated[float, Meta(ge=0.25, le=4.0)]
_Weight: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]


class BookingFact(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A plan's charge, as it is now."""

    number: _Count
    prefill: _Name
    decode: _Name
    prefill_tokens: _Count
    context_tokens: _Count
    age_s: _Seconds


class FreedFact(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A plan's charge is given back."""

    number: _Count


class HomeFact(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The workers of a session's last request."""

    model: _Name
    session: _Name
    prefill: _Name
    decode: _Name


class AnswerFact(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """An answer ended, or was left by its client."""

    model: _Name
    tenant: _Name
    session: _Name
    tokens: _Count
    ended: bool


class BeliefFact(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """What is believed of a worker: how many times as long as predicted it takes, and for how long it is suspect."""

    member: _Name
    prompts: _Factor
    answers: _Factor
    suspect_s: Annotated[float, Meta(ge=0, le=60)]


class LengthsFact(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """The lengths of a session's, tenant's or model's answers: number, weight and weighted sum of each range."""

    names: Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=3)]
    ranges: Annotated[
        list[tuple[Annotated[int, Meta(ge=0, le=512)], _Weight, Annotated[float, Meta(ge=0, le=1e15)]]],
        Meta(max_length=512),
    ]


Fact: TypeAlias = BookingFact | FreedFact | HomeFact | AnswerFact | BeliefFact
Record: TypeAlias = HomeFact | BeliefFact | LengthsFact

Inner = TypeVar("Inner")
_ENCODER = msgspec.msgpack.Encoder()
_OUTER = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_FACTS: msgspec.msgpack.Decoder[list[Fact]] = msgspec.msgpack.Decoder(list[Fact])
_BOOKING = msgspec.msgpack.Decoder(BookingFact)
_RECORD = msgspec.msgpack.Decoder(Record)


class ForeignState(ValueError):
    """Bytes that are none of ours, or of another format; its text says which."""


def pack(facts: Sequence[Fact] | BookingFact) -> bytes:
    """The bytes of a log's entry, or of one booking."""
    return _ENCODER.encode((FORMAT, facts))


def unpack_facts(data: object) -> list[Fact]:
    """An entry. Raises ForeignState."""
    return _inner(_FACTS, data)


def unpack_booking(data: object) -> BookingFact:
    """A booking. Raises ForeignState."""
    return _inner(_BOOKING, data)


def pack_record(record: Record, stamp_ms: int) -> bytes:
    """A record that is newer than those with a lower stamp; a script compares them."""
    return b"%s%0*d" % (_HEADER, _STAMP, stamp_ms) + _ENCODER.encode(record)


def unpack_record(data: object) -> tuple[Record, int]:
    """A record and its stamp. Raises ForeignState."""
    if not isinstance(data, bytes) or not data.startswith(_HEADER):
        raise ForeignState(f"not of format {FORMAT}")
    stamp = data[len(_HEADER) : len(_HEADER) + _STAMP]
    if len(stamp) < _STAMP or not stamp.isdigit():
        raise ForeignState("without a time")
    try:
        return _RECORD.decode(data[len(_HEADER) + _STAMP :]), int(stamp)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignState(str(error)) from None


def _inner(decoder: msgspec.msgpack.Decoder[Inner], data: object) -> Inner:
    if not isinstance(data, bytes):
        raise ForeignState("no bytes")
    try:
        number, raw = _OUTER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignState(str(error)) from None
    if number != FORMAT:
        raise ForeignState(f"of format {number}, not {FORMAT}")
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignState(str(error)) from None
