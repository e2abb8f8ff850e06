"""Tools of everyday kinds, from the table in `catalog.toml`, under one of their many names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from .phrasing import varied
from .tools import Parameter, ToolRequest, TrainingTool, mark, specification
from .values import spoken, value
from .words import Side


@dataclass(frozen=True)
class EverydayEntry:
    """One row of the table; the first name and the first key of each parameter are the canonical ones."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str, bool, str], ...]  # keys, kind, optional, description
    requests: tuple[str, ...]
    more: tuple[str, ...]  # requests for training alone
    result: tuple[tuple[str, str], ...]  # field, kind
    answer: str
    follow: tuple[str, ...]


@cache
def entries() -> tuple[EverydayEntry, ...]:
    """The table, in its order."""
    rows = tomllib.loads((Path(__file__).parent / "catalog.toml").read_text(encoding="utf-8"))["tool"]
    return tuple(_entry(row) for row in rows)


def _entry(row: Mapping[str, Any]) -> EverydayEntry:
    fields = tuple((field, kind) for field, _, kind in (text.partition(": ") for text in row["result"]))
    lists = {name: tuple(row.get(name, ())) for name in ("names", "descriptions", "requests", "more", "follow")}
    parameters = tuple(_row_parameter(text) for text in row["parameters"])
    return EverydayEntry(parameters=parameters, result=fields, answer=row["answer"], **lists)


def _row_parameter(text: str) -> tuple[tuple[str, ...], str, bool, str]:
    head, _, description = text.partition(" - ")
    keys, _, kind = head.partition(": ")
    return tuple(keys.rstrip("?").split("|")), kind, keys.endswith("?"), description


def everyday_tool(rng: Random, side: Side, entry: EverydayEntry) -> TrainingTool:
    """A tool of the catalog, with one of its names, descriptions and sets of keys."""
    canonical = rng.random() < 0.5
    parameters = []
    for keys, kind, optional, text in entry.parameters:
        key = keys[0] if canonical else rng.choice(keys)
        described = rng.random() < 0.6
        parameters.append(Parameter(key, keys[0].replace("_", " "), kind, optional, text if described else ""))
    name = entry.names[0] if canonical else rng.choice(entry.names)
    if rng.random() < 0.1:
        first, *others = name.split("_")
        name = first + "".join(w.capitalize() for w in others)
    description = rng.choice(entry.descriptions) if rng.random() < 0.92 else ""
    slots = [keys[0] for keys, *_ in entry.parameters]

    def build(rng: Random, text: str, fixed: Mapping[str, Any]) -> ToolRequest:
        values = {s: fixed.get(s, value(rng, side, p.kind)) for s, p in zip(slots, parameters, strict=True)}
        if values.get("destination") is not None and values["destination"] == values.get("origin"):
            values["destination"] = value(rng, side, "city")
        used = {s for s in slots if "{" + s + "}" in text} | set(fixed)
        arguments = {p.key: values[s] for s, p in zip(slots, parameters, strict=True) if s in used}
        result = {
            f: k[1:] if k.startswith("=") else values[f] if f in values else value(rng, side, k)
            for f, k in entry.result
        }
        answer = entry.answer
        for f, item in result.items():
            answer = answer.replace("{=" + f + "}", mark(item))
        for s, item in values.items():
            answer = answer.replace("{" + s + "}", mark(item))
            text = text.replace("{" + s + "}", spoken(item))
        return ToolRequest(
            text, name, arguments, result, answer, text.rstrip(".?"), _missing(rng, text, slots, parameters, values)
        )

    def ask(rng: Random) -> ToolRequest:
        forms = side.phrases(entry.requests) if side.evaluation else (*side.phrases(entry.requests), *entry.more)
        return build(rng, varied(rng, side, rng.choice(forms)), {})

    def follow(rng: Random, previous: ToolRequest) -> ToolRequest | None:
        if not entry.follow:
            return None
        text = rng.choice(entry.follow)
        kept = {
            s: previous.arguments[p.key]
            for s, p in zip(slots, parameters, strict=True)
            if "{" + s + "}" not in text and p.key in previous.arguments
        }
        return build(rng, text, kept)

    spec = specification(name, description, parameters)
    return TrainingTool(spec, entry.names[0], ask, follow)


def _missing(
    rng: Random, text: str, slots: Sequence[str], parameters: Sequence[Parameter], values: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """The request with its one value left out, for tools that need exactly one."""
    if len(parameters) != 1 or text.count(spoken(values[slots[0]])) != 1:
        return None
    before, _, after = text.partition(spoken(values[slots[0]]))
    for word in (" in ", " for ", " on ", " of ", " about ", " to ", " by ", " from ", " is "):
        if before.endswith(word) and after in ("?", ".", ", please.", " please."):
            cut = before[: -len(word)] + after
            if len(cut.split()) > 2:
                return cut, f"Which {parameters[0].words} should I use?", spoken(values[slots[0]])
    return None
