"""Drills: the skills that a session needs, alone and many times over."""

from __future__ import annotations

from random import Random

from .render import DECISION, PLAIN, Document
from .values import KINDS, spoken, value
from .words import Side


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
