"""What becomes of each field of a request body: honoured, accepted or refused.

It is declared with the types of the bodies, for those who read bodies and for docs/fields.md. A field without a
declaration is honoured.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from penstock.errors import InvalidRequest

ABSENT = Raw()
_SMALL = 64
"""Longest raw JSON, in bytes, that can still be a supported value."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a field."""

    kind: Literal["honoured", "accepted", "refused"]
    note: str = ""
    fine: tuple[str, ...] = ()
    """Values of a refused field that ask for no more than what every answer is, as JSON: in Python 1 equals true."""

    def words(self) -> str:
        """Why a value is refused."""
        values = " or ".join(self.fine)
        said = f"only {values} is supported" if values else "is not supported"
        return f"{said}; {self.note}" if self.note else said


def honoured(note: str) -> Meta:
    """The field does what its API says; `note` is for the reader of the documents."""
    return Meta(description=note, extra={"fate": Fate("honoured", note)})


def accepted(note: str) -> Meta:
    """The field is not read, because it promises nothing about the answer; `note` says why not."""
    return Meta(description=note, extra={"fate": Fate("accepted", note)})


def refused(note: str = "", *fine: object) -> Meta:
    """The field would change the answer, and is not served. null and the values in `fine` ask for nothing else than
    what every answer is."""
    return Meta(
        description=note or "not supported",
        extra={"fate": Fate("refused", note, tuple(_json(value) for value in fine))},
    )


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The fields of one type of body."""

    fates: Mapping[str, Fate]
    inner: Mapping[str, tuple[type[msgspec.Struct], ...]]
    """The types of bodies inside a field."""

    def watched(self) -> tuple[str, ...]:
        """The fields to look at for refused values, here or further inside."""
        within = (name for name, kinds in self.inner.items() if any(fields_of(kind).watched() for kind in kinds))
        return (*(name for name, fate in self.fates.items() if fate.kind == "refused"), *within)


@cache
def fields_of(body: type[msgspec.Struct]) -> BodyFields:
    """The fields of a type of body, as declared."""
    hints = typing.get_type_hints(body, include_extras=True)
    names = body.__struct_fields__
    return BodyFields(
        {name: _fate(hints[name]) for name in names}, {name: tuple(_bodies(hints[name])) for name in names}
    )


@cache
def watched_fields(body: type[msgspec.Struct]) -> tuple[tuple[str, Fate], ...]:
    """The fields of `body` to look at for refused values. The first call for a type reads its annotations, which takes
    tens of milliseconds."""
    fields = fields_of(body)
    return tuple((name, fields.fates[name]) for name in fields.watched())


def refuse(body: msgspec.Struct, place: str = "") -> None:
    """Raises InvalidRequest for the first refused field of `body`, or of a body inside it."""
    for name, fate in watched_fields(type(body)):
        value = getattr(body, name)
        if value is None or value is ABSENT:
            continue
        if fate.kind == "refused":
            field = f"{place}{name}"
            if not _is_fine(value, fate, field):
                raise InvalidRequest(f"{field}: {fate.words()}", field=field, code="unsupported_parameter")
        elif isinstance(value, list):
            for at, item in enumerate(value):
                if isinstance(item, msgspec.Struct):
                    refuse(item, f"{place}{name}[{at}].")
        elif isinstance(value, msgspec.Struct):
            refuse(value, f"{place}{name}.")


def decoded(raw: bytes | Raw, field: str) -> Any:
    """The value of a field of raw JSON. Its body's decoder has passed over numbers that are too large and texts that
    are not UTF-8: here they raise InvalidRequest."""
    try:
        return msgspec.json.decode(bytes(raw) or b"null")
    except RecursionError:
        raise InvalidRequest(f"{field}: is nested too deeply", field=field, code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{field}: is not valid JSON: {error}", field=field, code="invalid_json") from None


def text_of(raw: bytes | Raw, field: str) -> str:
    """The JSON text of a field of raw JSON. Raises InvalidRequest where it is not UTF-8."""
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{field}: is not valid UTF-8", field=field, code="invalid_json") from None


def _is_fine(value: object, fate: Fate, field: str) -> bool:
    if isinstance(value, Raw) and len(bytes(value)) > _SMALL:
        return False
    found: Any = decoded(value, field) if isinstance(value, Raw) else value
    whole = isinstance(found, float) and found.is_integer()
    return found is None or _json(int(found) if whole else found) in fate.fine


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _fate(hint: Any) -> Fate:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.extra and "fate" in meta.extra:
            found: Fate = meta.extra["fate"]
            return found
    return Fate("honoured")


def _bodies(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, msgspec.Struct):
        yield hint
    elif typing.get_origin(hint) is Annotated:
        yield from _bodies(typing.get_args(hint)[0])
    else:
        for inner in typing.get_args(hint):
            yield from _bodies(inner)
