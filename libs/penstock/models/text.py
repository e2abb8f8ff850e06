"""Plain English for the language share: what the machine already has under a free licence.

Two sources, both read in place: the Python language reference that ships inside every Python (`pydoc_data`,
PSF licence) and the glosses and example sentences of WordNet 3.0 (Debian's wordnet-base, WordNet licence)
where that is installed.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from random import Random

from .render import PLAIN, Document
from .words import WORDNET, held_out


@functools.cache
def reference() -> tuple[str, ...]:
    """The Python language reference as paragraphs."""
    from pydoc_data import topics

    paragraphs = "\n\n".join(topics.topics[k] for k in sorted(topics.topics)).split("\n\n")
    cleaned = (re.sub(r"\s*\n\s*", " ", p).strip() for p in paragraphs)
    return tuple(p for p in cleaned if 60 < len(p) < 1200 and p[0].isalpha() and "::=" not in p and ">>>" not in p)


@functools.cache
def glosses(directory: Path = WORDNET) -> tuple[str, ...]:
    """WordNet's entries as sentences `word: gloss`; empty where it is not installed."""
    lines = []
    for part in ("noun", "verb", "adj"):
        path = directory / f"data.{part}"
        if path.exists():
            for line in path.read_text(encoding="latin-1").splitlines():
                head, bar, gloss = line.partition(" | ")
                if bar and line[0] != " ":
                    word = head.split()[4].partition("(")[0].replace("_", " ")
                    lines.append(f"{word}: {gloss.strip()}")
    return tuple(lines)


class Library:
    """The paragraphs of one side of the split."""

    def __init__(self, evaluation: bool) -> None:
        self.long = [p for p in reference() if held_out(p) == evaluation]
        self.short = [p for p in glosses() if held_out(p) == evaluation]

    def document(self, rng: Random) -> Document:
        """A paragraph of the reference, or some glosses."""
        doc = Document(kind="text")
        if self.short and rng.random() < 0.65:
            text = "\n".join(rng.choice(self.short) for _ in range(rng.randint(2, 8)))
        else:
            text = rng.choice(self.long)
        doc.label(doc.add(text, PLAIN), "text")
        doc.add("<|endoftext|>", PLAIN)
        return doc
