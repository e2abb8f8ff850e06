"""What a completion must be: OpenAI's field, and those of other servers with its API."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.errors import InvalidRequest
from penstock.gateway.api.constraints import NOTHING, response_format, schema_part, structured_outputs
from penstock.gateway.api.fields import text_of
from penstock.gateway.api.openai.bodies import ChatBody, CompletionBody
from penstock.gateway.request import bounds
from penstock.gateway.request.bounds import check_count
from penstock.grammar.recipe import Kind, Part


def constraint_of(body: ChatBody | CompletionBody) -> Part | None:
    """What the answer must be; None: any text. Raises InvalidRequest naming the field, and for two constraints."""
    found: list[Part] = []
    for part in _parts(body):
        found.append(part)
        if len(found) > 1:
            what = f"{part.at}: {found[0].at} says already what the answer must be; send one of them"
            raise InvalidRequest(what, field=part.at)
    return found[0] if found else None


def _parts(body: ChatBody | CompletionBody) -> Iterator[Part]:
    formats = (response_format(bytes(body.response_format)), *structured_outputs(bytes(body.structured_outputs)))
    yield from (part for part in formats if part is not None)
    texts: tuple[tuple[str, Kind], ...] = (
        ("guided_regex", "regex"), ("guided_grammar", "grammar"), ("grammar", "grammar"), ("regex", "regex"),
        ("ebnf", "grammar"),
    )  # fmt: skip
    for name, kind in texts:
        if text := getattr(body, name):
            yield Part(kind, text, name)
    for name in ("guided_json", "json_schema"):
        if (raw := getattr(body, name)) and bytes(raw) not in NOTHING:
            yield schema_part(raw, name)
    if bytes(body.guided_choice) not in NOTHING:
        yield Part("choice", text_of(body.guided_choice, "guided_choice"), "guided_choice")
    if body.allowed_token_ids is not None:
        check_count("allowed_token_ids", len(body.allowed_token_ids), bounds.MAX_ALLOWED_TOKENS)
        yield Part("tokens", msgspec.json.encode(body.allowed_token_ids).decode(), "allowed_token_ids")
    if bytes(body.format) not in NOTHING:
        named = bytes(body.format) == b'"json"'
        yield Part("object", "", "format") if named else schema_part(body.format, "format")
