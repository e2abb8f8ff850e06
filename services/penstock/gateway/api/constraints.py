"""What clients say an answer must be, in the words of OpenAI, vLLM, llama.cpp, Ollama and SGLang.

Schemas stay text from the body to the helper that compiles them: nothing here decodes them.
"""

import re
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Raw

from penstock.errors import InvalidRequest
from penstock.gateway.api.fields import ABSENT, accepted, decoded, honoured, refused, text_of
from penstock.gateway.api.reader import BodyReader
from penstock.grammar.recipe import Part

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NOTHING = (b"", b"null", b'""')
"""Raw JSON that constrains nothing."""
Body = TypeVar("Body", bound=msgspec.Struct)


class SchemaBody(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: str
    schema: Annotated[Raw, honoured("JSON Schema; see docs/design/structured-output.md")] = ABSENT
    strict: Annotated[bool | None, honoured("the schema is followed either way")] = None
    description: Annotated[Raw, accepted("a note for the reader of the request")] = ABSENT


class FormatBody(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: Annotated[str, honoured("text, json_object, json_schema, or regex and grammar of other servers")]
    json_schema: SchemaBody | None = None
    schema: Annotated[Raw, honoured("a schema with the type json_object, as other servers have it")] = ABSENT
    pattern: Annotated[str | None, honoured("with the type regex")] = None
    grammar: Annotated[str | None, honoured("with the type grammar")] = None


class FlatFormatBody(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format` of OpenAI's Responses API: the schema's fields beside the type."""

    type: str
    name: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None
    description: Raw = ABSENT


class StructuredBody(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: Annotated[Raw, honoured("a schema, or the text of one")] = ABSENT
    regex: str | None = None
    choice: Annotated[Raw, honoured("a list of texts")] = ABSENT
    grammar: Annotated[str | None, honoured("Lark or GBNF")] = None
    json_object: bool | None = None
    structural_tag: Annotated[Raw, refused("send tools with strict")] = ABSENT
    whitespace_pattern: Annotated[Raw, refused("white space is what chat templates print")] = ABSENT
    disable_any_whitespace: Annotated[Raw, accepted("white space is never free")] = ABSENT
    disable_fallback: Annotated[Raw, accepted("there is one way to follow a grammar")] = ABSENT
    disable_additional_properties: Annotated[Raw, refused("write additionalProperties into the schema", False)] = ABSENT


_FORMAT = BodyReader(FormatBody)
_FLAT = BodyReader(FlatFormatBody)
_STRUCTURED = BodyReader(StructuredBody)


def response_format(raw: bytes, at: str = "response_format") -> Part | None:
    """The constraint of a `response_format`."""
    body = _read(_FORMAT, raw, at)
    if body is None:
        return None
    if body.type == "json_schema":
        if body.json_schema is None:
            raise _required(f"{at}.json_schema")
        return _named_schema(body.json_schema.name, body.json_schema.schema, f"{at}.json_schema")
    if body.type == "json_object" and bytes(body.schema) not in NOTHING:
        return schema_part(body.schema, f"{at}.schema")
    if body.type in ("regex", "grammar"):
        name = "pattern" if body.type == "regex" else "grammar"
        text = body.pattern if body.type == "regex" else body.grammar
        if text is None:
            raise _required(f"{at}.{name}")
        return Part("regex" if body.type == "regex" else "grammar", text, f"{at}.{name}")
    return _plain(body.type, at)


def text_format(raw: bytes, at: str = "text.format") -> Part | None:
    """The constraint of a `text.format` of OpenAI's Responses API."""
    body = _read(_FLAT, raw, at)
    if body is None:
        return None
    if body.type == "json_schema":
        if body.name is None:
            raise _required(f"{at}.name")
        return _named_schema(body.name, body.schema, at)
    return _plain(body.type, at)


def output_format(raw: bytes, at: str = "output_config.format") -> Part | None:
    """The constraint of an `output_config.format` of Anthropic's Messages API."""
    body = _read(_FLAT, raw, at)
    if body is None or body.type != "json_schema":
        return None if body is None else _plain(body.type, at)
    return schema_part(body.schema, f"{at}.schema")


def _plain(kind: str, at: str) -> Part | None:
    if kind not in ("text", "json_object"):
        what = f"{at}.type: must be text, json_object or json_schema, not {kind[:40]!r}"
        raise InvalidRequest(what, field=f"{at}.type", code="unsupported_parameter")
    return Part("object", "", at) if kind == "json_object" else None


def _named_schema(name: str, schema: Raw, at: str) -> Part:
    if not _NAME.fullmatch(name):
        what = f"{at}.name: must have 1 to 64 characters, which may be letters, digits, _, - and ."
        raise InvalidRequest(what, field=f"{at}.name")
    return schema_part(schema, f"{at}.schema")


def structured_outputs(raw: bytes, at: str = "structured_outputs") -> Iterator[Part]:
    """The constraints of vLLM's `structured_outputs`."""
    body = _read(_STRUCTURED, raw, at)
    if body is None:
        return
    if bytes(body.json) not in NOTHING:
        yield schema_part(body.json, f"{at}.json")
    if body.regex:
        yield Part("regex", body.regex, f"{at}.regex")
    if bytes(body.choice) not in NOTHING:
        yield Part("choice", text_of(body.choice, f"{at}.choice"), f"{at}.choice")
    if body.grammar:
        yield Part("grammar", body.grammar, f"{at}.grammar")
    if body.json_object:
        yield Part("object", "", f"{at}.json_object")


def schema_part(raw: Raw, at: str) -> Part:
    """A schema, or the text of one."""
    text = bytes(raw)
    if text in NOTHING:
        raise _required(at)
    if text.startswith(b'"'):
        return Part("schema", decoded(text, at), at)
    return Part("schema", text_of(text, at), at)


def _read(reader: BodyReader[Body], raw: bytes, at: str) -> Body | None:
    """An object inside of a body; None when there is none. Raises InvalidRequest naming the field in the body."""
    if raw in NOTHING:
        return None
    try:
        return reader.read(raw)
    except InvalidRequest as error:
        field = f"{at}.{error.field}" if error.field else at
        what = error.message if error.field else f": {error.message}"
        raise InvalidRequest(f"{at}{'.' if error.field else ''}{what}", field=field, code=error.code) from None


def _required(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: is required", field=field)
