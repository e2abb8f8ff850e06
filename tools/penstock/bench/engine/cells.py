"""Which work each engine is measured at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bench.engine.shapes import BIG, SMALL, ModelShape
from penstock.bench.engine.subjects import OURS, PEERS, Needs, Subject


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work, `rounds` times."""

    name: str
    tokens: int
    """Of each prompt."""
    streams: int = 1
    steps: int = 0
    """Steps of decoding; 0: only the prompt is computed."""
    rounds: int = 3
    warm_up: bool = True
    limit_s: float = 300.0
    """A subject that takes longer for a sample, computing prompts included, is left out."""

    @property
    def work(self) -> int:
        """Tokens that a sample computes or generates."""
        return self.streams * self.steps or self.tokens


@dataclass(frozen=True, slots=True)
class Sitting:
    """Cells for which the same processes take turns. The first subject is what the others are compared with."""

    shape: ModelShape
    subjects: tuple[Subject, ...]
    cells: tuple[Cell, ...]

    @property
    def needs(self) -> Needs:
        """Of every subject."""
        longest = [cell.tokens + cell.steps + 1 for cell in self.cells]
        room = [cell.streams * tokens for cell, tokens in zip(self.cells, longest, strict=True)]
        return Needs(max(cell.streams for cell in self.cells), max(longest), max(room))


PROMPT = 128
"""Tokens before decoding begins."""


_SMALL = (
    Cell("decode_b1", PROMPT, 1, 64, rounds=5),
    Cell("decode_b8", PROMPT, 8, 24, rounds=5),
    Cell("decode_b32", PROMPT, 32, 16, rounds=5),
    Cell("prefill_512", 512, rounds=5),
    Cell("prefill_2048", 2048, rounds=2, warm_up=False),
)
_BIG = (
    Cell("decode_b1", PROMPT, 1, 16, rounds=4),
    Cell("decode_b8", 64, 8, 8, rounds=2),
    Cell("decode_b32", 32, 32, 4, rounds=2),
    Cell("prefill_512", 512, rounds=2, warm_up=False),
    Cell("prefill_2048", 2048, rounds=1, warm_up=False),
)
_QUICK_SMALL = (
    Cell("decode_b1", PROMPT, 1, 24, rounds=3),
    Cell("decode_b8", PROMPT, 8, 8, rounds=2),
    Cell("decode_b32", 64, 32, 4, rounds=2),
    Cell("prefill_512", 512, rounds=2),
)
_QUICK_BIG = (
    Cell("decode_b1", PROMPT, 1, 6, rounds=2),
    Cell("decode_b8", 32, 8, 3, rounds=2),
    Cell("prefill_512", 512, rounds=1, warm_up=False),
)


def sessions(quick: bool) -> list[Sitting]:
    """All of them. `quick` leaves out what takes longest."""
    bfloat16 = (Subject(OURS), *(Subject(peer) for peer in PEERS))
    int8 = (Subject(OURS, "int8"), Subject("llamacpp", "int8"))
    int4 = (Subject(OURS, "int4"), Subject(OURS, "int8"), Subject("llamacpp", "int4"))
    return [
        Sitting(SMALL, bfloat16, _QUICK_SMALL if quick else _SMALL),
        Sitting(BIG, bfloat16[:3] if quick else bfloat16, _QUICK_BIG if quick else _BIG),
        Sitting(BIG, int8, (_QUICK_BIG if quick else _BIG)[:1]),
        Sitting(BIG, int4, (_QUICK_BIG if quick else _BIG)[:2]),
    ]


def parts(subjects: Sequence[Subject], weights: int, budget: int) -> list[tuple[Subject, ...]]:
    """Groups of subjects that fit into memory together, the first subject in each of them, the others in one each.

    `weights` in bytes as bfloat16. One that fits with nothing but the first gets it for itself, whatever the budget.
    """
    first, *others = subjects
    groups: list[list[Subject]] = []
    for one in others:
        group = groups[-1] if groups else [first]
        if not groups or weights * sum(each.memory for each in (*group, one)) > budget:
            groups.append([first])
        groups[-1].append(one)
    return [tuple(group) for group in groups] or [(first,)]
