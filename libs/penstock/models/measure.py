"""Teacher-forced measurement: which labelled ranges a model would write exactly so.

Where every token of a range is the argmax given what stands before it, greedy decoding writes that range.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

import torch
from tokenizers import Tokenizer

from .net import Net
from .render import Document
from .sessions import make
from .tokenizer import ids_and_starts
from .words import Side


def held_out_documents(kinds: Sequence[str], count: int, seed: int) -> list[Document]:
    """`count` evaluation documents of each kind."""
    side = Side(evaluation=True)
    return [make(kind, Random(f"eval:{seed}:{kind}:{i}"), side) for kind in kinds for i in range(count)]


def spans(starts: Sequence[int], doc: Document) -> Iterable[tuple[str, int, int]]:
    """Each label of `doc` with the tokens [first, last) that cover its range."""
    for begin, end, label in doc.labels:
        first = bisect_left(starts, begin) if label != "call" else bisect_right(starts, begin) - 1
        yield label, first, bisect_left(starts, end)


@torch.no_grad()
def exact(
    net: Net, tokenizer: Tokenizer, documents: Iterable[Document], length: int = 4096
) -> dict[str, tuple[int, int]]:
    """How many ranges of each `kind/label` are right, and how many there are."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    device = next(net.parameters()).device
    for doc in documents:
        ids, starts = ids_and_starts(tokenizer, doc.text)
        row = torch.tensor(ids[:length], device=device)
        hit = (net(row[None])[0, :-1].argmax(-1) == row[1:]).tolist()
        for label, first, last in spans(starts, doc):
            if 0 < first < last <= len(row):
                total[f"{doc.kind}/{label}"] += 1
                right[f"{doc.kind}/{label}"] += all(hit[first - 1 : last - 1])
    return {key: (right[key], total[key]) for key in sorted(total)}
