"""The keywords of JSON Schema: which constrain an answer, which say nothing about it, and which can't be followed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of strings that answers keep to."""
_LEAP = "(?:..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:.{{5}}(?:0[13-9]|1[0-2])|.{{5}}02-(?:[01]|2[0-8])|{_LEAP}-02-29)"
EXACT = {"date": (_DAY,), "time": ("^.{6}[0-5]",), "date-time": (_DAY, "^.{17}[0-5]")}
"""What the compiler's own patterns let pass: a 29th of February of every year, and leap seconds at any time. No leap
second is written at all."""
HINTS = ("password", "binary", "path")
"""Formats of which every string is one."""

IN_OBJECT = ("properties", "patternProperties")
"""Keywords that hold schemas by name."""
IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
IN_VALUE = ("items", "additionalProperties")

ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default",
        "example", "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding",
        "contentSchema", "discriminator", "externalDocs", "xml",
    )
)  # fmt: skip
"""Keywords that say nothing about which values are right."""

_MOST = 2**31 - 1
_LONGEST = 32
"""Characters of a name that may be a keyword with a mistake in it."""
_LARGEST = 10**18
"""Bounds of numbers beyond this are not exact in the compiler's 64 bits."""


def _is_count(value: object) -> str | None:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
    return None if whole and value == int(value) else f"must be a whole number from 0 to {_MOST}"  # type: ignore[call-overload]


def _is_number(value: object) -> str | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return None if fine else f"must be a number between -{_LARGEST:g} and {_LARGEST:g}"


def _is_step(value: object) -> str | None:
    return _is_number(value) or (None if value > 0 else "must be more than 0")  # type: ignore[operator]


def _is_text(value: object) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _is_names(value: object) -> str | None:
    fine = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if fine else "must be a list of strings"


def _is_types(value: object) -> str | None:
    given = value if isinstance(value, list) else [value]
    fine = bool(given) and all(isinstance(name, str) and name in TYPES for name in given)
    return None if fine else f"must be one of {', '.join(TYPES)}, or a list of them"


def _is_values(value: object) -> str | None:
    return None if isinstance(value, list) and value else "must be a list with at least one value"


CHECKS: dict[str, Callable[[object], str | None]] = {
    "$ref": _is_text,
    "type": _is_types,
    "enum": _is_values,
    "const": lambda value: None,
    "required": _is_names,
    "pattern": _is_text,
    "format": _is_text,
    "minLength": _is_count,
    "maxLength": _is_count,
    "minItems": _is_count,
    "maxItems": _is_count,
    "minProperties": _is_count,
    "maxProperties": _is_count,
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": _is_number,
    "exclusiveMaximum": _is_number,
    "multipleOf": _is_step,
}
"""Says what a keyword's value must be, None when it is right."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "not": (),
    "if": (),
    "then": (),
    "else": (),
    "uniqueItems": (False,),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$dynamicAnchor": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
    "$vocabulary": (),
    "nullable": (False,),
    "extends": (),
    "disallow": (),
    "divisibleBy": (),
    "x-guidance": (),
}
"""Keywords that no answer can be held to, each with the values that ask for nothing."""
UNSUPPORTED = tuple(_UNSUPPORTED)
SUPPORTED = (*CHECKS, *IN_OBJECT, *IN_LIST, *IN_VALUE)


def whole(value: object) -> object:
    """A number without fraction as an integer, which the compiler wants; everything else as it is."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


def asks_for_nothing(keyword: str, value: object) -> bool:
    """Whether the keyword may be left out: it is an annotation, or has a value with which it allows everything."""
    if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in _UNSUPPORTED):
        return True
    return any(type(value) is type(nothing) and value == nothing for nothing in _UNSUPPORTED.get(keyword, ()))


def unknown(keyword: str) -> str | None:
    """What is wrong with a keyword that is not supported; None for one of somebody's own, which JSON Schema lets pass.

    A name that is nearly a keyword is a mistake that would go unnoticed.
    """
    if keyword in _UNSUPPORTED:
        return "is not supported"
    if len(keyword) > _LONGEST:
        return None
    near = difflib.get_close_matches(keyword, (*SUPPORTED, *_UNSUPPORTED), n=1, cutoff=0.85)
    return f"is no keyword of JSON Schema; did you mean {near[0]}?" if near else None
