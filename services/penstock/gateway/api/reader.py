"""Reads request bodies: what is wrong is named by its place, an unknown field with the nearest one that is known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.gateway.api.fields import fields_of, refuse, watched_fields
from penstock.gateway.api.long_texts import LongTexts

_AT = re.compile(r"(?P<what>.*) - at `(?P<path>[^`]*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`\Z")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(?:\d+|\.\.\.)\]")
_BOM = b"\xef\xbb\xbf"
_LONGEST_NAME = 64
_LONGEST_COMPLAINT = 400
"""Characters; a complaint may quote the whole of a wrong value."""

Body = TypeVar("Body", bound=msgspec.Struct)


class BodyReader(Generic[Body]):
    """Reads bodies of one type, whose structs forbid unknown fields."""

    def __init__(self, body: type[Body]) -> None:
        self._body = body
        self._decoder = msgspec.json.Decoder(body)
        watched_fields(body)  # now, and not while the first client waits

    def read(self, raw: bytes, ignored: list[str] | None = None) -> Body:
        """The body. Raises InvalidRequest naming the field.

        An unknown field is an error, unless there is a list for the places of `ignored` fields.
        """
        raw = raw.removeprefix(_BOM)
        try:
            body = self._decode(raw)
        except _UnknownField as unknown:
            if ignored is None:
                raise unknown.error from None
            body = self._without_unknown(raw, ignored)
        refuse(body)
        return body

    def _decode(self, raw: bytes) -> Body:
        texts = LongTexts(raw)
        with _refusing_what_is_no_json():
            try:
                body: Body = texts.put_back(self._decoder.decode(texts.rest))
                return body
            except msgspec.ValidationError as error:
                raise self._named(texts.without_names(str(error))) from None

    def _without_unknown(self, raw: bytes, ignored: list[str]) -> Body:
        with _refusing_what_is_no_json():
            value = msgspec.json.decode(raw)  # the whole: what stands behind an unknown field was not looked at yet
        kept = _strip(value, (self._body,), "", ignored)
        try:
            return self._decode(msgspec.json.encode(kept))
        except _UnknownField as unknown:  # in a place that the types do not tell, such as one of several shapes
            raise unknown.error from None

    def _named(self, text: str) -> Exception:
        """msgspec's message, with its path as OpenAI's `param`."""
        match = _AT.fullmatch(text)
        field = (match["path"] if match else "").removeprefix("$").removeprefix(".")
        what = match["what"] if match else text
        if unknown := _UNKNOWN.fullmatch(what):
            return _UnknownField(self._unknown(field, unknown["name"]))
        if missing := _MISSING.fullmatch(what):
            field = f"{field}.{missing['name']}" if field else missing["name"]
            what = "is required"
        what = what if len(what) <= _LONGEST_COMPLAINT else f"{what[:_LONGEST_COMPLAINT]}..."
        return InvalidRequest(f"{field}: {what}" if field else what, field=field or None)

    def _unknown(self, place: str, name: str) -> InvalidRequest:
        field = f"{place}.{name[:_LONGEST_NAME]}" if place else name[:_LONGEST_NAME]
        nearest = difflib.get_close_matches(name[:_LONGEST_NAME], _known(self._body, place), n=1, cutoff=0.7)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        return InvalidRequest(f"{field}: is not a known field{hint}", field=field, code="unknown_parameter")


@contextmanager
def _refusing_what_is_no_json() -> Iterator[None]:
    """Raises InvalidRequest for the errors of a decoder."""
    try:
        yield
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


class _UnknownField(Exception):
    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(error.message)
        self.error = error


def _known(body: type[msgspec.Struct], place: str) -> list[str]:
    """The fields that a client may want at `place`."""
    kinds: list[type[msgspec.Struct]] = [body]
    for step in _STEP.finditer(place):
        if step[1]:
            kinds = [inner for kind in kinds for inner in fields_of(kind).inner.get(step[1], ())]
    fates = (fields_of(kind).fates for kind in kinds)
    return [name for found in fates for name, fate in found.items() if fate.kind != "refused" or fate.fine]


def _strip(value: Any, kinds: tuple[type[msgspec.Struct], ...], place: str, ignored: list[str]) -> Any:
    """`value` without the fields that none of `kinds` has; notes their places."""
    if not kinds:
        return value
    if isinstance(value, list):
        return [_strip(item, kinds, f"{place}[{at}]", ignored) for at, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    known = {name for kind in kinds for name in fields_of(kind).fates}
    ignored += [_join(place, name) for name in value if name not in known]
    return {
        name: _strip(item, tuple(_inner(kinds, name)), _join(place, name), ignored)
        for name, item in value.items()
        if name in known
    }


def _inner(kinds: tuple[type[msgspec.Struct], ...], name: str) -> Iterator[type[msgspec.Struct]]:
    for kind in kinds:
        yield from fields_of(kind).inner.get(name, ())


def _join(place: str, name: str) -> str:
    return f"{place}.{name[:_LONGEST_NAME]}" if place else name[:_LONGEST_NAME]
