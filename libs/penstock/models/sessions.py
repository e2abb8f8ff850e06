"""The training and evaluation data: every kind of document, from a seed.

A document is a function of its random stream, of the side of the split and of the word list that is installed
(`words.lexicon`). Kinds by name are in `MAKERS`; evaluation uses those that are not made for training alone, and has
`asking` and `foreign` for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Literal, get_args

from . import talk
from .agent import ASKING, FOREIGN, LACKING, agent, dense, names_only
from .drills import lookup_drill, repeat_drill, select_drill
from .json_tasks import NUMBERS, json_task
from .render import Document, render
from .session import Dialogue
from .tools import mark
from .words import Side


def facts(rng: Random, side: Side, count: int, questions: int) -> Document:
    """Facts in the system prompt or in the conversation, and questions about them."""
    session = Dialogue(rng, side)
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
    session = Dialogue(rng, side)
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
        if rng.random() < 0.3:
            session.open_question()
            continue
        said, reply = talk.small_talk(rng)
        session.messages.append({"role": "user", "content": said})
        session.say(reply, "chat")
    return render(session.messages, (), "chat")


Maker = Callable[[Random, Side], Document]
ToolKind = Literal["L1", "L2", "L3", "everyday", "long", "huge"]
KINDS: tuple[ToolKind, ...] = get_args(ToolKind)
"""Of tool sessions that evaluation measures; `huge` ones count for a figure of their own alone."""

MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "repeat": repeat_drill,
        "lookup": lookup_drill,
        "select": select_drill,
        "json": lambda rng, side: json_task(rng, side, rng.randint(1, 4)),
        "facts": lambda rng, side: facts(rng, side, rng.randint(2, 12), rng.randint(3, 8)),
        "chat": chat,
        "L1": lambda rng, side: agent(
            rng, side, 1, rng.choice((1, 2, 2)), rng.randint(2, 6), everyday=0.2, habits=None
        ),
        "L2": lambda rng, side: agent(rng, side, 2, rng.randint(2, 4), rng.randint(3, 7), sentences=rng.randint(0, 2)),
        "L3": lambda rng, side: agent(rng, side, 3, rng.randint(2, 6), rng.randint(3, 8), sentences=rng.randint(0, 4)),
        "everyday": lambda rng, side: agent(
            rng, side, 3, rng.randint(3, 6), rng.randint(3, 8), sentences=rng.randint(0, 6), everyday=1.0
        ),
        "long": lambda rng, side: agent(
            rng, side, 3, rng.randint(8, 20), rng.randint(4, 10), sentences=rng.choice((2, 10, 30)), everyday=0.4
        ),
        "dense1": lambda rng, side: dense(rng, side, 1, rng.randint(3, 8), everyday=0.1),
        "dense2": lambda rng, side: dense(rng, side, 2, rng.randint(3, 9), everyday=0.2),
        "dense3": lambda rng, side: dense(rng, side, 3, rng.randint(3, 9), everyday=0.25),
        "errands": lambda rng, side: dense(rng, side, 3, rng.randint(4, 9), everyday=1.0),
        "jsons": lambda rng, side: json_task(rng, side, rng.randint(4, 8), 0.1, NUMBERS),
        "names": lambda rng, side: names_only(rng, side, rng.randint(5, 12)),
        "alike2": lambda rng, side: dense(rng, side, 2, rng.randint(3, 9), everyday=0.0, alike=1.0),
        "alike3": lambda rng, side: dense(rng, side, 3, rng.randint(3, 9), everyday=0.0, alike=1.0),
        "lacking": lambda rng, side: dense(
            rng, side, rng.choice((2, 3)), rng.randint(3, 7), everyday=0.3, habits=LACKING
        ),
        "told2": lambda rng, side: dense(rng, side, 2, rng.randint(3, 9), everyday=0.0, told=0.8),
        "told3": lambda rng, side: dense(rng, side, 3, rng.randint(3, 9), everyday=0.0, told=0.8),
        "likenames": lambda rng, side: names_only(rng, side, rng.randint(5, 12), alike=1.0),
        "huge": lambda rng, side: agent(
            rng, side, 3, rng.randint(16, 36), rng.randint(6, 12), sentences=rng.choice((2, 10, 60)), everyday=0.4
        ),
        "vast": lambda rng, side: agent(
            rng, side, 3, rng.randint(36, 80), rng.randint(8, 16), sentences=rng.choice((10, 60)), everyday=0.4
        ),
        "asking": lambda rng, side: agent(rng, side, 2, rng.randint(2, 5), 8, sentences=2, everyday=0.2, habits=ASKING),
        "foreign": lambda rng, side: agent(rng, side, 2, rng.randint(2, 5), 8, sentences=2, habits=FOREIGN),
    }
)


def make(kind: str, rng: Random, side: Side) -> Document:
    """A document of a kind named in `MAKERS`."""
    return MAKERS[kind](rng, side)
