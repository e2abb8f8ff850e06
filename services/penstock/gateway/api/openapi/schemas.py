"""JSON Schema of msgspec's types.

msgspec's own generator cannot write the default of a field of raw JSON, and does not know what becomes of a field.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import inspect

from penstock.gateway.api.fields import fields_of
from penstock.gateway.api.inquiry import Json
from penstock.gateway.request.bounds import BOUNDS

_PLAIN: dict[type[inspect.Type], Json] = {
    inspect.AnyType: {},
    inspect.RawType: {},
    inspect.NoneType: {"type": "null"},
    inspect.BoolType: {"type": "boolean"},
    inspect.IntType: {"type": "integer"},
    inspect.FloatType: {"type": "number"},
    inspect.StrType: {"type": "string"},
}


def reference(body: type[msgspec.Struct]) -> Json:
    """Where the schema of a type stands in the document."""
    return {"$ref": f"#/components/schemas/{body.__name__}"}


def components(bodies: Iterable[type[msgspec.Struct]]) -> Json:
    """The schemas of the types, and of all types inside them, by name."""
    found: Json = {}
    waiting = list(bodies)
    while waiting:
        body = waiting.pop()
        if body.__name__ not in found:
            found[body.__name__] = _struct(body, waiting)
    return dict(sorted(found.items()))


def _struct(body: type[msgspec.Struct], inner: list[type[msgspec.Struct]]) -> Json:
    told = inspect.type_info(body)
    assert isinstance(told, inspect.StructType)
    fates = fields_of(body).fates
    properties = {}
    for field in told.fields:
        schema = _schema(field.type, inner)
        if bound := BOUNDS.get(field.name) if _is_number(field.type) else None:
            schema |= {"minimum": bound.low, "maximum": bound.high}
        if isinstance(field.default, str | int | float | None):
            schema["default"] = field.default
        fate = fates[field.name]
        if fate.kind != "honoured":
            schema |= {
                "x-penstock-fate": fate.kind,
                "description": fate.words() if fate.kind == "refused" else fate.note,
            }
        properties[field.encode_name] = schema
    schema = {"type": "object", "properties": properties, "description": (body.__doc__ or "").strip()}
    if required := [field.encode_name for field in told.fields if field.required]:
        schema["required"] = required
    return schema | ({"additionalProperties": False} if told.forbid_unknown_fields else {})


def _schema(told: inspect.Type, inner: list[type[msgspec.Struct]]) -> Json:
    if type(told) in _PLAIN:
        return dict(_PLAIN[type(told)])
    if isinstance(told, inspect.Metadata):
        return {**_schema(told.type, inner), **(told.extra_json_schema or {})}
    if isinstance(told, inspect.StructType):
        inner.append(told.cls)
        return reference(told.cls)
    if isinstance(told, inspect.UnionType):
        return {"anyOf": [_schema(kind, inner) for kind in told.types]}
    if isinstance(told, inspect.ListType):
        return {"type": "array", "items": _schema(told.item_type, inner)}
    if isinstance(told, inspect.DictType):
        return {"type": "object", "additionalProperties": _schema(told.value_type, inner)}
    if isinstance(told, inspect.LiteralType):
        return {"enum": list(told.values)}
    raise TypeError(f"no schema of {told}")


def _is_number(told: inspect.Type) -> bool:
    if isinstance(told, inspect.Metadata):
        return _is_number(told.type)
    if isinstance(told, inspect.UnionType):
        return any(map(_is_number, told.types))
    return isinstance(told, inspect.IntType | inspect.FloatType)
