"""Made-up tools: nouns, parameters and results are drawn at random, so that only reading the schema can tell what to
call and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Any

from .phrasing import joint, varied
from .tools import Parameter, ToolRequest, TrainingTool, mark, specification, tool_name
from .values import KINDS, schema, spoken, value
from .words import ACTION_VERBS, QUERY_VERBS, Side

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
_MORE_QUERIES = (  # for training alone, as are _MORE_ACTIONS
    "I am looking for the {n} of {t}.",
    "{t} has which {n}?",
    "Say what the {n} of {t} is.",
    "How about the {n} of {t}?",
    "Any idea what the {n} of {t} is?",
    "The {n} of {t}, please.",
    "My boss asks for the {n} of {t}.",
    "What {n} belongs to {t}?",
    "Take {t}, I want its {n}.",
    "I want to see the {n} of {t}.",
    "Is there a {n} for {t}?",
    "Search the {n} for {t}.",
    "{n} for {t}, please.",
    "Let me have the {n} of {t}.",
    "Report the {n} of {t}.",
    "It is about {t}: which {n}?",
    "I do not know the {n} of {t}.",
    "Somebody wants the {n} for {t}.",
)
_MORE_ACTIONS = (
    "{v} {n} {x} for me.",
    "The {n} {x} is next: {v} it.",
    "Time to {v} the {n} {x}.",
    "I would like you to {v} {n} {x}.",
    "Make sure to {v} the {n} {x}.",
    "We want to {v} the {n} {x}.",
    "Someone has to {v} the {n} {x}.",
    "It is necessary to {v} {n} {x}.",
    "Try to {v} the {n} {x}.",
    "You may {v} the {n} {x}.",
    "Do {v} {n} {x}.",
    "My request: {v} the {n} {x}.",
    "Next, {v} {n} {x}.",
    "I ask you to {v} the {n} {x}.",
    "About the {n} {x}: {v} it.",
    "They told me to {v} the {n} {x}.",
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


_MEANING: Mapping[str, str] = MappingProxyType(
    {
        "book": "reserve",
        "cancel": "call off",
        "clear": "empty",
        "close": "shut",
        "create": "make",
        "delete": "erase",
        "disable": "turn off",
        "download": "save",
        "enable": "turn on",
        "notify": "inform",
        "print": "put on paper",
        "publish": "make public",
        "register": "sign up",
        "reject": "turn down",
        "remove": "take out",
        "reserve": "book",
        "restart": "start again",
        "resume": "go on with",
        "return": "give back",
        "send": "deliver",
        "start": "begin",
        "stop": "end",
        "submit": "hand in",
        "update": "change",
    }
)
"""Verbs that tell of another."""


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
    extra = joint(rng, side, rng.choice(side.phrases(_EXTRAS))).format(e=joined)
    return text[: len(text) - len(end)] + extra + end


def invented(rng: Random, side: Side, level: int, told: float = 0.0) -> TrainingTool:
    """A made-up tool: `level` 1 has one parameter, 2 up to two, 3 none to four and optional ones. A share `told` is
    described with another verb than it is called by."""
    query = rng.random() < 0.6
    noun, thing = side.noun(rng), side.noun(rng)
    verb = rng.choice(QUERY_VERBS if query else ACTION_VERBS)
    words = ToolWords(query, verb, noun, thing if query else noun)
    if told and rng.random() < told:
        words = replace(words, told=rng.choice(QUERY_VERBS) if query else _MEANING.get(verb, verb))
    return _tool(rng, side, level, words, subject=noun)


def alike_tools(rng: Random, side: Side, level: int, count: int) -> list[TrainingTool]:
    """Made-up tools that share their words: two have the same verb, noun or thing more often than not, but never all
    of them, so that no single word tells which is meant."""
    nouns, things = ([side.noun(rng) for _ in range(count // 2 + 1)] for _ in range(2))
    verbs = rng.sample(QUERY_VERBS, 2), rng.sample(ACTION_VERBS, min(len(ACTION_VERBS), count // 2 + 2))
    made: dict[str, TrainingTool] = {}
    subjects = set()
    while len(made) < count:
        query, noun = rng.random() < 0.5, rng.choice(nouns)
        words = ToolWords(query, rng.choice(verbs[not query]), noun, rng.choice(things) if query else noun)
        name, description = _naming(rng, side, words)
        subject = f"{noun} of {words.thing}" if query else f"{words.verb} {noun}"
        if description and name not in made and subject not in subjects:
            made[name] = _tool(rng, side, level, words, subject=subject, naming=(name, description))
            subjects.add(subject)
    return list(made.values())


@dataclass(frozen=True)
class ToolWords:
    """What a made-up tool is called by."""

    query: bool  # looks up the `noun` of a `thing`; otherwise does something with a `noun`, which is the `thing`
    verb: str
    noun: str
    thing: str
    told: str = ""  # the verb of its description, where that is another


def _tool(
    rng: Random, side: Side, level: int, words: ToolWords, *, subject: str, naming: tuple[str, str] | None = None
) -> TrainingTool:
    query, noun, thing = words.query, words.noun, words.thing
    main, parameters = _parameters(rng, side, level, noun, thing)
    name, description = naming or _naming(rng, side, words)
    field = (noun if query else side.noun(rng), rng.choice(KINDS))
    more = (side.noun(rng), rng.choice(KINDS)) if level > 1 and rng.random() < 0.4 else None
    design = _Design(side, query, _spoken_verb(words.verb), noun, thing, main, parameters, name, field, more)
    spec = specification(name, description, parameters)
    return TrainingTool(spec, subject, design.ask, design.follow, field if query else None, design.accepts)


def _parameters(rng: Random, side: Side, level: int, noun: str, thing: str) -> tuple[Parameter, Sequence[Parameter]]:
    """The main parameter and all of them in order; a tool without parameters has no use for the main one."""
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
    return main, parameters


def _naming(rng: Random, side: Side, words: ToolWords) -> tuple[str, str]:
    """A name and a description; at least one of them tells what the tool is about."""
    V = _spoken_verb(words.told or words.verb)
    texts = _QUERY_TEXTS if words.query else _ACTION_TEXTS
    description = rng.choice(texts).format(V=V.capitalize(), v=V, n=words.noun, t=words.thing)
    parts = [words.verb, words.noun]
    if words.query and rng.random() < 0.3:
        parts.append(words.thing)
    if rng.random() < 0.15:
        parts = [words.noun, words.verb]
    if rng.random() < 0.08:
        parts = [side.pseudo(rng), side.pseudo(rng)]
    elif rng.random() < 0.08:
        description = ""
    return tool_name(rng, parts), description


def _spoken_verb(verb: str) -> str:
    return "look up" if verb == "lookup" else verb


@dataclass(frozen=True)
class _Design:
    """What a made-up tool is about, and so what can be asked of it."""

    side: Side
    query: bool  # looks up the `noun` of a `thing`; otherwise does something with a `noun`, which is the `thing`
    verb: str
    noun: str
    thing: str
    main: Parameter
    parameters: Sequence[Parameter]
    name: str
    field: tuple[str, str]  # of the result: its name and kind
    more: tuple[str, str] | None  # another one

    def ask(self, rng: Random) -> ToolRequest:
        """A request with values for all that is required and some of the rest."""
        chosen = [p for p in self.parameters if not p.optional or rng.random() < 0.5]
        phrases = self.side.phrases(_QUERIES if self.query else _ACTIONS)
        if not self.side.evaluation:
            phrases = (*phrases, *(_MORE_QUERIES if self.query else _MORE_ACTIONS))
        form = varied(rng, self.side, rng.choice(phrases))
        return self._build(rng, form, {p.key: value(rng, self.side, p.kind) for p in chosen})

    def follow(self, rng: Random, previous: ToolRequest) -> ToolRequest | None:
        """The same again with another main value."""
        main = self.main
        if main not in self.parameters or main.key not in previous.arguments:
            return None
        values = dict(previous.arguments) | {main.key: value(rng, self.side, main.kind)}
        made = self._build(rng, "{n} {t}", values)
        form = rng.choice(
            ("And {v}?", "And for {v}?", "What about {v}?", "Now {v}.", "The same for {v}.", "And {t} {v}?")
        )
        return replace(made, text=form.format(v=spoken(values[main.key]), t=self.thing), missing=None)

    def accepts(self, rng: Random, words: str, item: Any) -> ToolRequest | None:
        """A request whose main value is a result, `item`, that is called `words`; None if it does not fit."""
        main = self.main
        if main not in self.parameters or len(self.parameters) > 2 or isinstance(item, bool):
            return None
        if isinstance(item, str) != (schema(main.kind)["type"] == "string") or isinstance(item, float):
            return None
        values = {p.key: value(rng, self.side, p.kind) for p in self.parameters} | {main.key: item}
        made = self._build(rng, "{n}", values)
        others = [(p, values[p.key]) for p in self.parameters if p is not main]
        clause = f"{self.verb} the {self.noun} of {self.thing}" if self.query else f"{self.verb} the {self.noun}"
        clause = _with(rng, self.side, f"{clause} with that {words}", others, clause=True)
        return replace(made, clause=clause)

    def _build(self, rng: Random, text: str, values: Mapping[str, Any]) -> ToolRequest:
        used = [p for p in self.parameters if p.key in values]
        others = [(p, values[p.key]) for p in used if p is not self.main]
        shown = spoken(values[self.main.key]) if self.main in used else ""
        request = _with(rng, self.side, self._filled(text, shown), others)
        missing = self._missing(rng, text, values, used)
        result, answer = self._outcome(rng, shown)
        clause = f"{self.verb} the {self.noun} of {self._target(shown)}"
        if not self.query:
            clause = f"{self.verb} the {self.noun} {shown}".rstrip()
        clause = _with(rng, self.side, clause, others, clause=True)
        return ToolRequest(request, self.name, {p.key: values[p.key] for p in used}, result, answer, clause, missing)

    def _target(self, shown: str) -> str:
        return f"{self.thing} {shown}" if shown else self.thing

    def _filled(self, text: str, shown: str) -> str:
        """A phrasing with the words of this tool and its main value in their places."""
        filled = text.replace("{n}", self.noun).replace("{t}", self._target(shown))
        filled = filled.replace("{x}", shown).replace("{v}", self.verb)
        filled = filled.replace(" .", ".").replace(" ?", "?").replace(" ,", ",").replace(" :", ":")
        return filled[0].upper() + filled[1:]

    def _missing(
        self, rng: Random, text: str, values: Mapping[str, Any], used: Sequence[Parameter]
    ) -> tuple[str, str, str] | None:
        """The request without one of its required values, the question for it and the reply."""
        lacking = [p for p in used if not p.optional]
        if not lacking:
            return None
        gone = rng.choice(lacking)
        others = [(p, values[p.key]) for p in used if p is not self.main and p is not gone]
        if gone is self.main:
            bare = text.replace("{n}", self.noun).replace("{t}", f"a {self.thing}")
            bare = bare.replace(" {x}", "").replace("{v}", self.verb)
            filled = bare[0].upper() + bare[1:]
        else:
            filled = self._filled(text, spoken(values[self.main.key]) if self.main in used else "")
        cut = _with(rng, self.side, filled, others)
        return cut, f"Which {gone.words} should I use?", spoken(values[gone.key])

    def _outcome(self, rng: Random, shown: str) -> tuple[dict[str, Any], str]:
        """What the tool returns, and the answer that says so."""
        name, kind = self.field
        item = value(rng, self.side, kind)
        if self.query:
            result: dict[str, Any] = {name: item}
            subject = f"The {self.noun} of {mark(shown)}" if shown else f"The {self.noun}"
            answer = f"{subject} is {mark(item)}."
        else:
            result = {"status": "ok", name: item}
            answer = f"Done. The {name} is {mark(item)}."
        if self.more is not None and self.more[0] not in result:
            result[self.more[0]] = value(rng, self.side, self.more[1])
            if rng.random() < 0.5:
                result = dict(reversed(result.items()))
        return result, answer
