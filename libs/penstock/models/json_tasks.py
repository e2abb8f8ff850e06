"""Answers that must be JSON for a schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from .render import Document, render
from .session import Dialogue
from .talk import system_prompt
from .tools import mark
from .values import KINDS, schema, spoken, value
from .words import Side


def _schema(keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    properties = {k: schema(kind) for k, kind in keys}
    return {"type": "object", "properties": properties, "required": [k for k, _ in keys]}


def _schema_text(rng: Random, name: str, keys: Sequence[tuple[str, str]]) -> str:
    """The schema as users give it: as JSON schema, or as keys with types."""
    if rng.random() < 0.6:
        full = _schema(keys)
        if rng.random() < 0.3:
            full = {"title": name.capitalize()} | full
        if rng.random() < 0.4:
            full["additionalProperties"] = False
        return json.dumps(full)
    return "{" + ", ".join(f'"{k}": {schema(kind)["type"]}' for k, kind in keys) + "}"


NUMBERS = (*KINDS, "int", "int", "number", "number", "bool", "bool")  # half of the values are no strings


def json_task(
    rng: Random, side: Side, tasks: int = 3, fixed_share: float = 0.3, kinds: Sequence[str] = KINDS
) -> Document:
    """Answers that must be JSON for a schema given in the request or, in `fixed_share`, in the system prompt.

    Each answer's message has the `schema` as a client would send it beside the request, however the text puts it.
    """
    session = Dialogue(rng, side)
    fixed = rng.random() < fixed_share
    keys = _json_keys(rng, side, kinds)
    name = side.noun(rng)
    lead = ("Reply with JSON that matches this schema: {s}", "Answer only with JSON for this schema: {s}")
    if fixed:
        session.system(system_prompt(rng, side, 1) + "\n" + rng.choice(lead).format(s=_schema_text(rng, name, keys)))
    elif rng.random() < 0.3:
        session.system(system_prompt(rng, side, rng.randint(0, 3)))
    for _ in range(tasks):
        if not fixed:
            keys = _json_keys(rng, side, kinds)
            name = side.noun(rng)
        values = {k: value(rng, side, kind) for k, kind in keys}
        text = _stated(rng, name, values)
        if not fixed:
            text = _ordered(rng, text, _schema_text(rng, name, keys), values)
        session.messages.append({"role": "user", "content": text})
        answer = {"role": "assistant", "content": _marked_json(values), "label": "json", "schema": _schema(keys)}
        session.messages.append(answer)
    return render(session.messages, (), "json")


def _stated(rng: Random, name: str, values: Mapping[str, Any]) -> str:
    """The values in a sentence, in any order."""
    shown = list(values.items())
    if rng.random() < 0.4:
        rng.shuffle(shown)
    form = rng.choice(("{k} is {v}", "{k}: {v}", "{k} {v}", "{k} = {v}"))
    facts = ", ".join(form.format(k=k.replace("_", " "), v=spoken(v)) for k, v in shown)
    text = rng.choice(("Here is a {n}: {f}.", "The {n}: {f}.", "{f}", "Make a {n} with {f}.", "Extract the {n}. {f}."))
    return text.format(n=name, f=facts)


def _ordered(rng: Random, text: str, schema_text: str, keys: Iterable[str]) -> str:
    """A request for JSON of that schema, before or after `text`."""
    return rng.choice(
        (
            f"{text} Reply with JSON that matches this schema: {schema_text}",
            f"{text}\nAnswer as JSON: {schema_text}",
            f"Answer only with JSON for this schema: {schema_text}\n{text}",
            f"Return JSON for this schema: {schema_text}\n{text}",
            f"{text} As JSON with the keys {', '.join(keys)}.",
        )
    )


def _json_keys(rng: Random, side: Side, kinds: Sequence[str]) -> list[tuple[str, str]]:
    count = rng.choice((1, 2, 2, 3, 3, 4))
    return list({_key(rng, side): rng.choice(kinds) for _ in range(count)}.items())


def _key(rng: Random, side: Side) -> str:
    noun = side.noun(rng)
    return f"{rng.choice(side.adjectives)}_{noun}" if rng.random() < 0.2 else noun


def _marked_json(values: Mapping[str, Any]) -> str:
    fields = []
    for key, item in values.items():
        quote = '"' if isinstance(item, str) else ""
        fields.append(f'"{key}": {quote}{mark(item)}{quote}')
    return "{" + ", ".join(fields) + "}"
