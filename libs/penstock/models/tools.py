"""Random tools and the requests they serve.

Two sorts: everyday tools from the catalog under one of their many names, and made-up tools whose nouns,
parameters and results are drawn at random, so that only reading the schema can tell what to call and how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from .catalog import ENTRIES, Entry
from .render import MARK_CLOSE, MARK_OPEN
from .values import KINDS, schema, spoken, value
from .words import ACTION_VERBS, QUERY_VERBS, Side


@dataclass(frozen=True)
class Parameter:
    """A parameter: its key, how people call it, the kind of its values."""

    key: str
    words: str
    kind: str
    optional: bool = False
    description: str = ""


@dataclass(frozen=True)
class Ask:
    """A request, the one right call for it, the result of that call and the answer to give."""

    text: str
    name: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any]
    answer: str
    clause: str  # the request as a clause, to be joined with another
    missing: tuple[str, str, str] | None = None  # request without a value, question, reply


@dataclass(frozen=True)
class Tool:
    """A tool that can be asked for; `ask` makes a request, `follow` a short one after an earlier request."""

    spec: Mapping[str, Any]
    subject: str  # what it is about: two tools of one subject would be ambiguous
    ask: Callable[[Random], Ask]
    follow: Callable[[Random, Ask], Ask | None]
    produces: tuple[str, str] | None = None  # a result field and its kind, for chains
    accepts: Callable[[Random, str, Any], Ask | None] = field(default=lambda rng, words, item: None)


def mark(item: Any) -> str:
    """A value in an answer, marked as such."""
    return f"{MARK_OPEN}{spoken(item)}{MARK_CLOSE}"


def specification(name: str, description: str, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The OpenAI description of a tool."""
    properties = {}
    for p in parameters:
        properties[p.key] = schema(p.kind) | ({"description": p.description} if p.description else {})
    required = [p.key for p in parameters if not p.optional]
    function: dict[str, Any] = {
        "name": name,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def _name(rng: Random, words: Sequence[str]) -> str:
    style = rng.random()
    if style < 0.65:
        return "_".join(words)
    if style < 0.85:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    return "-".join(words)


# ---------------------------------------------------------------- everyday tools


def everyday(rng: Random, side: Side, entry: Entry) -> Tool:
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

    def build(rng: Random, text: str, fixed: Mapping[str, Any]) -> Ask:
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
        return Ask(
            text, name, arguments, result, answer, text.rstrip(".?"), _missing(rng, text, slots, parameters, values)
        )

    def ask(rng: Random) -> Ask:
        return build(rng, rng.choice(side.phrases(entry.requests)), {})

    def follow(rng: Random, previous: Ask) -> Ask | None:
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
    return Tool(spec, entry.names[0], ask, follow)


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


# ---------------------------------------------------------------- made-up tools

_QUERIES = (
    "What is the {n} of {t}?",
    "Tell me the {n} of {t}.",
    "What's the {n} for {t}?",
    "I need the {n} of {t}.",
    "Find the {n} of {t}.",
    "Get the {n} for {t}.",
    "Could you look up the {n} of {t}?",
    "{t}: what is the {n}?",
    "Please get me the {n} of {t}.",
    "I would like to know the {n} of {t}.",
    "Check the {n} for {t}.",
    "Do you know the {n} of {t}?",
    "{n} of {t}?",
    "Show me the {n} for {t}.",
    "Give me the {n} of {t}, please.",
    "Can you find the {n} for {t}?",
    "For {t}, what is the {n}?",
    "Look up the {n} of {t}.",
    "Which {n} does {t} have?",
    "Can I have the {n} of {t}?",
)
_ACTIONS = (
    "{v} the {n} {x}.",
    "Please {v} the {n} {x}.",
    "Can you {v} the {n} {x}?",
    "{v} {n} {x}.",
    "I want to {v} the {n} {x}.",
    "Could you {v} {n} {x}?",
    "{v} {n} {x}, please.",
    "The {n} {x}: {v} it.",
    "I need you to {v} {n} {x}.",
    "Now {v} the {n} {x}.",
    "Would you {v} the {n} {x}?",
    "I have to {v} the {n} {x}.",
    "Go ahead and {v} the {n} {x}.",
    "We must {v} {n} {x}.",
    "Let us {v} the {n} {x}.",
)
_EXTRAS = (
    " with {e}",
    ", {e}",
    " and use {e}",
    " using {e}",
    " where {e}",
    " with the {e}",
    " given {e}",
    ", with {e}",
    " for the {e}",
    " taking {e}",
)
_PAIRS = (
    "{p} {v}",
    "{p} {v}",
    "{p} {v}",
    "{p} = {v}",
    "{p} {v}",
    "{p}: {v}",
    "{p} is {v}",
    "{p} set to {v}",
    "{p} {v}",
)
_QUERY_TEXTS = (
    "{V} the {n} of a {t}.",
    "{V} the {n} for a {t}",
    "Returns the {n} of a {t}.",
    "{V} which {n} a {t} has.",
    "{V} the current {n} of the {t}.",
    "Use this to {v} the {n} of a {t}.",
    "The {n} of a given {t}.",
)
_ACTION_TEXTS = (
    "{V} a {n}.",
    "{V} the {n}",
    "{V} one {n}.",
    "{V} a {n} in the system.",
    "Use this to {v} a {n}.",
    "Lets the user {v} a {n}.",
    "{V} an existing {n}.",
)


def _parameter(rng: Random, side: Side, level: int) -> Parameter:
    noun = side.noun(rng)
    words = f"{rng.choice(side.adjectives)} {noun}" if rng.random() < 0.2 else noun
    kind = rng.choice(KINDS) if level > 1 else rng.choice(("name", "word", "id", "int"))
    text = rng.choice((f"The {words}", f"{words.capitalize()} to use", f"Which {words}")) if rng.random() < 0.3 else ""
    return Parameter(words.replace(" ", "_"), words, kind, False, text)


def _main(rng: Random, side: Side, thing: str, level: int) -> Parameter:
    kind = rng.choice(("name", "name", "word", "id", "id", "phrase", "int", "email", "file"))
    suffix = "" if level == 1 else rng.choice(("", "", "", "_id", "_name", "_key"))
    key = thing + suffix if level < 3 or rng.random() < 0.9 else rng.choice(("id", "name", "key"))
    text = rng.choice((f"The {thing}", f"{thing.capitalize()} to look at", f"Name of the {thing}"))
    described = rng.random() < 0.4 or key in ("id", "name", "key")
    return Parameter(key, thing, kind, False, text if described else "")


def _with(rng: Random, side: Side, text: str, pairs: Sequence[tuple[Parameter, Any]], clause: bool = False) -> str:
    """`text` with the other parameters' values worked in before its final mark; a `clause` stays one."""
    if not pairs:
        return text
    order = list(pairs)
    rng.shuffle(order)
    form = rng.choice(_PAIRS)
    parts = [form.format(p=p.words, v=spoken(v)) for p, v in order]
    joined = (", ".join(parts[:-1]) + " and " if len(parts) > 1 else "") + parts[-1]
    end = text[-1] if text[-1] in ".?" else ""
    if not clause and rng.random() < 0.25:
        sentence = ", ".join(f"{p.words} is {spoken(v)}" for p, v in order)
        return f"{text} {sentence[0].upper()}{sentence[1:]}."
    extra = rng.choice(side.phrases(_EXTRAS)).format(e=joined)
    return text[: len(text) - len(end)] + extra + end


def invented(rng: Random, side: Side, level: int) -> Tool:
    """A made-up tool: `level` 1 has one parameter, 2 up to two, 3 none to four and optional ones."""
    query = rng.random() < 0.6
    noun, thing = side.noun(rng), side.noun(rng)
    verb = rng.choice(QUERY_VERBS if query else ACTION_VERBS)
    if not query:
        thing = noun
    count = {1: 1, 2: rng.choice((1, 2)), 3: rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))}[level]
    main = _main(rng, side, thing, level)
    extras: list[Parameter] = []
    while len(extras) < count - 1:
        extra = _parameter(rng, side, level)
        if extra.key not in (main.key, noun, *(e.key for e in extras)):
            optional = level == 3 and rng.random() < 0.2
            extras.append(replace(extra, optional=optional))
    parameters = [main, *extras][:count]
    if rng.random() < 0.3:
        rng.shuffle(parameters)

    texts = _QUERY_TEXTS if query else _ACTION_TEXTS
    V = "look up" if verb == "lookup" else verb
    description = rng.choice(texts).format(V=V.capitalize(), v=V, n=noun, t=thing)
    words = [verb, noun, thing] if query and rng.random() < 0.3 else [verb, noun]
    if rng.random() < 0.15:
        words = [noun, verb]
    if rng.random() < 0.08:
        words = [side.pseudo(rng), side.pseudo(rng)]
    elif rng.random() < 0.08:
        description = ""
    name = _name(rng, words)
    field_noun = noun if query else side.noun(rng)
    field_kind = rng.choice(KINDS)
    more = (side.noun(rng), rng.choice(KINDS)) if level > 1 and rng.random() < 0.4 else None

    def build(rng: Random, text: str, values: Mapping[str, Any], omit: str = "") -> Ask:
        used = [p for p in parameters if p.key in values]
        arguments = {p.key: values[p.key] for p in used}
        others = [(p, values[p.key]) for p in used if p is not main]
        shown = spoken(values[main.key]) if main in used else ""
        target = f"{thing} {shown}" if shown else thing
        filled = text.replace("{n}", noun).replace("{t}", target).replace("{x}", shown).replace("{v}", V)
        filled = filled.replace(" .", ".").replace(" ?", "?").replace(" ,", ",").replace(" :", ":")
        filled = filled[0].upper() + filled[1:]
        request = _with(rng, side, filled, others)
        missing = None
        lacking = [p for p in used if not p.optional]
        if lacking:
            gone = rng.choice(lacking)
            if gone is main:
                bare = text.replace("{n}", noun).replace("{t}", f"a {thing}").replace(" {x}", "").replace("{v}", V)
                cut = _with(rng, side, bare[0].upper() + bare[1:], others)
            else:
                cut = _with(rng, side, filled, [o for o in others if o[0] is not gone])
            missing = (cut, f"Which {gone.words} should I use?", spoken(values[gone.key]))
        item = value(rng, side, field_kind)
        if query:
            result: dict[str, Any] = {field_noun: item}
            subject = f"the {noun} of {mark(shown)}" if shown else f"the {noun}"
            answer = f"{subject[0].upper()}{subject[1:]} is {mark(item)}."
        else:
            result = {"status": "ok", field_noun: item}
            answer = f"Done. The {field_noun} is {mark(item)}."
        if more is not None and more[0] not in result:
            result[more[0]] = value(rng, side, more[1])
            if rng.random() < 0.5:
                result = dict(reversed(result.items()))
        clause = f"{V} the {noun} of {target}" if query else f"{V} the {noun} {shown}".rstrip()
        clause = _with(rng, side, clause, others, clause=True)
        return Ask(request, name, arguments, result, answer, clause, missing)

    def ask(rng: Random) -> Ask:
        chosen = [p for p in parameters if not p.optional or rng.random() < 0.5]
        phrases = side.phrases(_QUERIES if query else _ACTIONS)
        return build(rng, rng.choice(phrases), {p.key: value(rng, side, p.kind) for p in chosen})

    def follow(rng: Random, previous: Ask) -> Ask | None:
        if main not in parameters or main.key not in previous.arguments:
            return None
        values = dict(previous.arguments) | {main.key: value(rng, side, main.kind)}
        made = build(rng, "{n} {t}", values)
        shown = spoken(values[main.key])
        form = rng.choice(
            ("And {v}?", "And for {v}?", "What about {v}?", "Now {v}.", "The same for {v}.", "And {t} {v}?")
        )
        return replace(made, text=form.format(v=shown, t=thing), missing=None)

    def accepts(rng: Random, words: str, item: Any) -> Ask | None:
        if main not in parameters or len(parameters) > 2 or isinstance(item, bool):
            return None
        if isinstance(item, str) != (schema(main.kind)["type"] == "string") or isinstance(item, float):
            return None
        values = {p.key: value(rng, side, p.kind) for p in parameters} | {main.key: item}
        made = build(rng, "{n}", values)
        others = [(p, values[p.key]) for p in parameters if p is not main]
        clause = f"{V} the {noun} of {thing}" if query else f"{V} the {noun}"
        return replace(made, clause=_with(rng, side, f"{clause} with that {words}", others, clause=True))

    produces = (field_noun, field_kind) if query else None
    return Tool(specification(name, description, parameters), noun, ask, follow, produces, accepts)


def toolbox(rng: Random, side: Side, count: int, level: int, everyday_share: float) -> list[Tool]:
    """`count` tools with different names and subjects, some of them everyday ones."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = everyday(rng, side, rng.choice(ENTRIES)) if rng.random() < everyday_share else invented(rng, side, level)
        names = {t.spec["function"]["name"] for t in tools}
        if tool.spec["function"]["name"] not in names and all(tool.subject != t.subject for t in tools):
            tools.append(tool)
    return tools
