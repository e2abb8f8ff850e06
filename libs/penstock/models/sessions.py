"""The training and evaluation data: agent sessions, JSON tasks, copy drills, all from a seed.

A document is a function of its random stream, of the side of the split and of the word list that is installed
(`words.lexicon`). Kinds by name are in `MAKERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

from . import talk
from .render import DECISION, PLAIN, Document, render
from .tools import Ask, Tool, mark, toolbox
from .values import KINDS, schema, spoken, value
from .words import Side

Message = dict[str, Any]


class Session:
    """Messages under construction: each method appends what one exchange says."""

    def __init__(self, rng: Random, side: Side) -> None:
        self.rng = rng
        self.side = side
        self.messages: list[Message] = []
        self.calls = 0

    def system(self, text: str) -> None:
        if text:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        rng = self.rng
        draw = rng.random()
        if draw < 0.05:
            text = rng.choice(("Hi, ", "Hello, ", "Ok, ", "Next: ", "Also, ")) + text
        elif draw < 0.09:
            text += rng.choice((" Thanks.", " Thank you.", " Please be quick."))
        self.messages.append({"role": "user", "content": text})

    def say(self, text: str, label: str = "answer") -> None:
        self.messages.append({"role": "assistant", "content": text, "label": label})

    def call(self, *asks: Ask) -> list[str]:
        """The assistant calls; returns the call ids."""
        ids = [f"call_{self.calls + i}" for i in range(len(asks))]
        self.calls += len(asks)
        calls = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": a.name, "arguments": json.dumps(a.arguments, ensure_ascii=False)},
            }
            for id_, a in zip(ids, asks, strict=True)
        ]
        self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        return ids

    def result(self, id_: str, content: Mapping[str, Any] | str) -> None:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        self.messages.append({"role": "tool", "tool_call_id": id_, "content": text})

    # ------------------------------------------------------------ exchanges

    def perform(self, ask: Ask, short: bool = False) -> None:
        """Call, result, answer."""
        (id_,) = self.call(ask)
        if short:
            self.result(id_, "ok")
            self.say("Done.")
            return
        result: Mapping[str, Any] | str = ask.result
        if len(ask.result) == 1 and self.rng.random() < 0.1:
            result = spoken(next(iter(ask.result.values())))
        self.result(id_, result)
        self.say(ask.answer)

    def failing(self, ask: Ask) -> None:
        """A call that fails: for good, and the user is told; or for now, and it is called again."""
        rng = self.rng
        self.user(ask.text)
        (id_,) = self.call(ask)
        if rng.random() < 0.5:
            reason = rng.choice(
                ("not found", "access denied", "out of service", "invalid value", "no such entry", "limit reached")
            )
            detail = next((spoken(v) for v in ask.arguments.values()), ask.name)
            error = rng.choice((f"{detail}: {reason}", f"{reason}: {detail}", reason))
            self.result(id_, {"error": error})
            self.say(f"Sorry, that did not work: {mark(error)}.")
        else:
            self.result(
                id_,
                {"error": rng.choice(("timeout, try again", "temporarily unavailable, try again", "busy, try again"))},
            )
            self.perform(ask)

    def asking_back(self, ask: Ask) -> None:
        """A request that lacks a value: a question, the value, the call."""
        if ask.missing is None:
            self.user(ask.text)
            return self.perform(ask)
        request, question, reply = ask.missing
        self.user(request)
        self.say(question)
        form = self.rng.choice(("{v}", "{v}", "{v}.", "Use {v}.", "{v}, please.", "It is {v}."))
        self.messages.append({"role": "user", "content": form.format(v=reply)})
        self.perform(ask)

    def parallel(self, first: Ask, second: Ask) -> None:
        """Two calls at once."""
        join = self.rng.choice((" and ", " and also ", ", and ", " and then "))
        text = first.clause + join + second.clause[0].lower() + second.clause[1:]
        self.user(text[0].upper() + text[1:] + ".")
        ids = self.call(first, second)
        self.result(ids[0], first.result)
        self.result(ids[1], second.result)
        self.say(f"{first.answer} {second.answer}")

    def chained(self, first: Ask, second: Ask) -> None:
        """Two calls, the second of which needs the result of the first."""
        text = f"{first.clause}, then {second.clause[0].lower()}{second.clause[1:]}."
        self.user(text[0].upper() + text[1:])
        (id_,) = self.call(first)
        self.result(id_, first.result)
        self.perform(second)


def _chain(rng: Random, tools: Sequence[Tool]) -> tuple[Ask, Ask] | None:
    for first in rng.sample(list(tools), len(tools)):
        if first.produces is None:
            continue
        ask = first.ask(rng)
        words = first.produces[0]
        for second in rng.sample(list(tools), len(tools)):
            if second is not first and (then := second.accepts(rng, words, ask.result.get(words))) is not None:
                return ask, then
    return None


def _system(rng: Random, side: Side, sentences: int) -> str:
    if sentences == 0 and rng.random() < 0.5:
        return ""
    role, _ = talk.persona(rng, side)
    parts = [role, *talk.rules(rng, side, sentences)]
    return rng.choice((" ", "\n")).join(parts)


def agent(
    rng: Random,
    side: Side,
    level: int,
    tools: int,
    turns: int,
    sentences: int = 0,
    everyday: float = 0.35,
    plain: bool = False,
) -> Document:
    """A session of `turns` exchanges over `tools` tools; `plain` keeps to simple requests."""
    session = Session(rng, side)
    box = toolbox(rng, side, tools, level, everyday)
    session.system(_system(rng, side, sentences))
    last: tuple[Tool, Ask] | None = None
    short = rng.random() < 0.3
    for _ in range(turns):
        draw = 1.0 if plain else rng.random()
        tool = rng.choice(box)
        ask = tool.ask(rng)
        if last and rng.random() < 0.15 and (next_ask := last[0].follow(rng, last[1])):
            session.user(next_ask.text)
            session.perform(next_ask, short)
            last = (last[0], next_ask)
            continue
        if draw < 0.06:
            session.failing(ask)
        elif draw < 0.14:
            session.asking_back(ask)
        elif draw < 0.22:
            session.parallel(ask, rng.choice(box).ask(rng) if rng.random() < 0.6 else tool.ask(rng))
        elif draw < 0.29 and (chain := _chain(rng, box)):
            session.chained(*chain)
        elif draw < 0.36:
            said, reply = talk.small_talk(rng)
            session.messages.append({"role": "user", "content": said})
            session.say(reply, "chat")
        elif draw < 0.39:
            other = toolbox(rng, side, 1, 2, 0.5)[0]
            if all(other.subject != t.subject for t in box):
                session.user(other.ask(rng).text)
                session.say("Sorry, I have no tool for that.")
        else:
            session.user(ask.text)
            session.perform(ask, short)
            last = (tool, ask)
    return render(session.messages, [t.spec for t in box], f"agent{level}")


# ---------------------------------------------------------------- JSON answers


def _schema_text(rng: Random, name: str, keys: Sequence[tuple[str, str]]) -> str:
    """The schema as users give it: as JSON schema, or as keys with types."""
    if rng.random() < 0.6:
        properties = {k: schema(kind) for k, kind in keys}
        full: dict[str, Any] = {"type": "object", "properties": properties, "required": [k for k, _ in keys]}
        if rng.random() < 0.3:
            full = {"title": name.capitalize()} | full
        if rng.random() < 0.4:
            full["additionalProperties"] = False
        return json.dumps(full)
    return "{" + ", ".join(f'"{k}": {schema(kind)["type"]}' for k, kind in keys) + "}"


def json_task(rng: Random, side: Side, tasks: int = 3) -> Document:
    """Answers that must be JSON for a schema given in the request or in the system prompt."""
    session = Session(rng, side)
    fixed = rng.random() < 0.3
    keys = _json_keys(rng, side)
    name = side.noun(rng)
    lead = ("Reply with JSON that matches this schema: {s}", "Answer only with JSON for this schema: {s}")
    if fixed:
        session.system(_system(rng, side, 1) + "\n" + rng.choice(lead).format(s=_schema_text(rng, name, keys)))
    elif rng.random() < 0.3:
        session.system(_system(rng, side, rng.randint(0, 3)))
    for _ in range(tasks):
        if not fixed:
            keys = _json_keys(rng, side)
            name = side.noun(rng)
        values = {k: value(rng, side, kind) for k, kind in keys}
        shown = list(values.items())
        if rng.random() < 0.4:
            rng.shuffle(shown)
        form = rng.choice(("{k} is {v}", "{k}: {v}", "{k} {v}", "{k} = {v}"))
        facts = ", ".join(form.format(k=k.replace("_", " "), v=spoken(v)) for k, v in shown)
        text = rng.choice(
            ("Here is a {n}: {f}.", "The {n}: {f}.", "{f}", "Make a {n} with {f}.", "Extract the {n}. {f}.")
        )
        text = text.format(n=name, f=facts)
        if not fixed:
            ask = _schema_text(rng, name, keys)
            order = (
                f"{text} Reply with JSON that matches this schema: {ask}",
                f"{text}\nAnswer as JSON: {ask}",
                f"Answer only with JSON for this schema: {ask}\n{text}",
                f"Return JSON for this schema: {ask}\n{text}",
                f"{text} As JSON with the keys {', '.join(values)}.",
            )
            text = rng.choice(order)
        session.messages.append({"role": "user", "content": text})
        session.messages.append({"role": "assistant", "content": _marked_json(values), "label": "json"})
    return render(session.messages, (), "json")


def _json_keys(rng: Random, side: Side) -> list[tuple[str, str]]:
    count = rng.choice((1, 2, 2, 3, 3, 4))
    return list({_key(rng, side): rng.choice(KINDS) for _ in range(count)}.items())


def _key(rng: Random, side: Side) -> str:
    noun = side.noun(rng)
    return f"{rng.choice(side.adjectives)}_{noun}" if rng.random() < 0.2 else noun


def _marked_json(values: Mapping[str, Any]) -> str:
    fields = []
    for key, item in values.items():
        quote = '"' if isinstance(item, str) else ""
        fields.append(f'"{key}": {quote}{mark(item)}{quote}')
    return "{" + ", ".join(fields) + "}"


# ---------------------------------------------------------------- drills and talk


def repeat_drill(rng: Random, side: Side) -> Document:
    """Random words, then the same words again: the loss is on the repetition."""
    doc = Document(kind="drill")
    separator = rng.choice((" ", "\n", ", ", "_", '", "'))
    words = [spoken(value(rng, side, rng.choice(KINDS))) for _ in range(rng.randint(4, 40))]
    if rng.random() < 0.7:  # any word at all, so that no token's embedding stays what chance made it
        words = [rng.choice(side.everything) for _ in range(rng.randint(20, 120))]
        words = [w.capitalize() if rng.random() < 0.2 else w for w in words]
    text = separator.join(words)
    doc.add(text + "\n")
    for _ in range(rng.choice((1, 1, 2))):
        doc.add(text + "\n", PLAIN)
    return doc


def lookup_drill(rng: Random, side: Side) -> Document:
    """A table of keys and values, then keys in another order: the loss is on their values."""
    doc = Document(kind="lookup")
    form = rng.choice(
        ("{k}: {v}", '"{k}": "{v}"', "{k} = {v}", "the {k} is {v}", '{k} -> {{"name": "{v}"}}', "{k} {v}")
    )
    kind = rng.choice(KINDS)
    table = {}
    for _ in range(rng.randint(2, 14)):
        key = side.noun(rng) if rng.random() < 0.7 else f"{side.noun(rng)} {side.noun(rng)}"
        table[key] = spoken(value(rng, side, kind))
    for key, item in table.items():
        doc.add(form.format(k=key, v=item) + "\n")
    doc.add("\n")
    for _ in range(rng.randint(3, 12)):
        key = rng.choice(list(table))
        before, _, after = form.format(k=key, v="\0").partition("\0")
        doc.add(before)
        start, _ = doc.add(table[key] + after + "\n", PLAIN)
        doc.decide(start)
    return doc


def select_drill(rng: Random, side: Side) -> Document:
    """Descriptions with names, then a few words of a description: the loss is on the name that belongs to it."""
    doc = Document(kind="select")
    rows: list[tuple[list[str], str]] = []
    for _ in range(rng.randint(2, 8)):
        words = [side.noun(rng) for _ in range(rng.randint(2, 5))]
        rows.append((words, side.pseudo(rng) + rng.choice(("", f"_{side.noun(rng)}"))))
        doc.add(" ".join(words) + f'\n{{"name": "{rows[-1][1]}"}}\n')
    doc.add("\n")
    for _ in range(rng.randint(3, 10)):
        words, name = rng.choice(rows)
        some = rng.sample(words, rng.randint(1, len(words)))
        doc.add(" ".join(some) + '\n{"name": "')
        start, _ = doc.add(f'{name}"}}\n', PLAIN)
        doc.ranges.append((start, start + 1, DECISION))
    return doc


def facts(rng: Random, side: Side, count: int, questions: int) -> Document:
    """Facts in the system prompt or in the conversation, and questions about them."""
    session = Session(rng, side)
    role, _ = talk.persona(rng, side)
    known = [talk.fact(rng, side) for _ in range(count)]
    sentences = [k[0] for k in known] + talk.rules(rng, side, rng.randint(0, 3))
    rng.shuffle(sentences)
    session.system(" ".join([role, *sentences]))
    for _ in range(questions):
        _, question, answer = rng.choice(known)
        session.user(question)
        session.say(answer)
    return render(session.messages, (), "facts")


def chat(rng: Random, side: Side) -> Document:
    """Small talk, and the assistant's name."""
    session = Session(rng, side)
    role, name = talk.persona(rng, side)
    named = rng.random() < 0.6
    if named:
        session.system(" ".join([role, *talk.rules(rng, side, rng.randint(0, 4))]))
    for _ in range(rng.randint(1, 5)):
        if named and rng.random() < 0.25:
            question = rng.choice(("Who are you?", "What is your name?", "What are you called?", "Your name?"))
            session.messages.append({"role": "user", "content": question})
            session.say(f"I am {mark(name)}.", "chat")
            continue
        said, reply = talk.small_talk(rng)
        session.messages.append({"role": "user", "content": said})
        session.say(reply, "chat")
    return render(session.messages, (), "chat")


Maker = Callable[[Random, Side], Document]

MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "repeat": repeat_drill,
        "lookup": lookup_drill,
        "select": select_drill,
        "json": lambda rng, side: json_task(rng, side, rng.randint(1, 4)),
        "facts": lambda rng, side: facts(rng, side, rng.randint(2, 12), rng.randint(3, 8)),
        "chat": chat,
        "L1": lambda rng, side: agent(rng, side, 1, rng.choice((1, 2, 2)), rng.randint(2, 6), 0, 0.2, plain=True),
        "L2": lambda rng, side: agent(rng, side, 2, rng.randint(2, 4), rng.randint(3, 7), rng.randint(0, 2)),
        "L3": lambda rng, side: agent(rng, side, 3, rng.randint(2, 6), rng.randint(3, 8), rng.randint(0, 4)),
        "everyday": lambda rng, side: agent(rng, side, 3, rng.randint(3, 6), rng.randint(3, 8), rng.randint(0, 6), 1.0),
        "long": lambda rng, side: agent(
            rng, side, 3, rng.randint(8, 20), rng.randint(4, 10), rng.choice((2, 10, 30)), 0.4
        ),
        "huge": lambda rng, side: agent(
            rng, side, 3, rng.randint(16, 36), rng.randint(6, 12), rng.choice((2, 10, 60)), 0.4
        ),
    }
)


def make(kind: str, rng: Random, side: Side) -> Document:
    """A document of a kind named in `MAKERS`."""
    return MAKERS[kind](rng, side)
