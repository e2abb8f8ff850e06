"""docs/fields.md, made from the types of the bodies: `python -m penstock.gateway.api.table > docs/fields.md`."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.gateway.api.anthropic.bodies import MessagesBody
from penstock.gateway.api.fields import Fate, fields_of
from penstock.gateway.api.openai.batch_bodies import BatchBody
from penstock.gateway.api.openai.bodies import ChatBody, CompletionBody
from penstock.gateway.api.responses.bodies import ResponseBody
from penstock.gateway.request.bounds import Bound, bound_of, number

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/batches": BatchBody,
}
APIS: dict[type[msgspec.Struct], str] = {MessagesBody: "anthropic"}
"""Bodies with bounds of their own."""
_HEAD = """# The fields of requests

Made by `make fields` from the types that read the requests; a test compares.

Every field is **honoured**, or **accepted** because it promises nothing about the answer, or **refused** with a 400
that names it, unless its value asks for what every answer is. An unknown field is a 400 too, which names the nearest
known one; with `--unknown-fields warn` the gateway ignores it and names it in the header `x-penstock-ignored-fields`.
`null` means that a field is absent. Where an integer is due, `5` is one and `5.0` is not.

`max_tokens` is an upper bound, and is treated as one: it is lowered to the room that the prompt leaves in the model's
context, to the gateway's `--max-output-tokens`, and to an equal share of `--max-request-tokens` for each choice of the
request; left out, it is the least of these. An answer that reaches the bound has
`finish_reason: "length"`. Only a prompt that leaves no room at all is an error (`context_length_exceeded`).
"""


def document() -> str:
    """The whole document."""
    return _HEAD + "".join(f"\n## POST {path}\n{''.join(_tables(body))}" for path, body in BODIES.items())


def _tables(body: type[msgspec.Struct]) -> Iterator[str]:
    rows = list(_rows(body, "", APIS.get(body, "")))
    for kind, title in (("honoured", "Honoured"), ("accepted", "Accepted"), ("refused", "Refused")):
        if not any(fate.kind == kind for _, fate, _ in rows):
            continue
        yield f"\n### {title}\n\n| field | {'bounds | ' if kind == 'honoured' else ''}{_COLUMNS[kind]} |\n"
        yield f"|---|{'---|' if kind == 'honoured' else ''}---|\n"
        for field, fate, bounds in rows:
            if fate.kind == kind:
                between = f" {bounds} |" if kind == "honoured" else ""
                yield f"| `{field}` |{between} {_words(fate)} |\n"


_COLUMNS = {"honoured": "note", "accepted": "why", "refused": "what is served"}


def _rows(body: type[msgspec.Struct], place: str, api: str) -> Iterator[tuple[str, Fate, str]]:
    fields = fields_of(body)
    hints = typing.get_type_hints(body)
    for name, fate in sorted(fields.fates.items()):
        yield f"{place}{name}", fate, _bounds(bound_of(f"{place}{name}", api), hints[name])
        many = "[]" if "list[" in str(hints[name]) else ""
        for inner in fields.inner[name]:
            yield from _rows(inner, f"{place}{name}{many}.", api)


def _words(fate: Fate) -> str:
    return (fate.words() if fate.kind == "refused" else fate.note).replace("|", "\\|")


def _bounds(bound: Bound | None, hint: Any) -> str:
    numeric = any(kind in str(hint) for kind in ("int", "float"))
    return f"{number(bound.low)} to {number(bound.high)}" if bound and numeric else ""


if __name__ == "__main__":
    print(document(), end="")
