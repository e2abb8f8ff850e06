"""From documents to batches: a mixture that changes with progress, token weights, buckets of equal length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .render import PLAIN, Document
from .sessions import make
from .text import Library
from .tokenizer import END_OF_TEXT, ids_and_starts
from .words import Side

Mixture = Mapping[str, float]


class Source(Protocol):
    """Where documents of kind `text` come from."""

    def document(self, rng: Random) -> Document: ...


@dataclass(frozen=True)
class TokenizedDocument:
    """A tokenized document; `weights[i]` is the weight of predicting token i."""

    ids: Sequence[int]
    weights: Sequence[float]
    starts: Sequence[int]


@dataclass(frozen=True)
class TrainingBatch:
    """Padded rows; `keep` are the flat positions whose next token carries weight."""

    ids: Tensor  # (rows, length)
    keep: Tensor  # (kept,) flat index into (rows, length)
    targets: Tensor  # (kept,)
    weights: Tensor  # (kept,)

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    def to(self, device: torch.device) -> TrainingBatch:
        return TrainingBatch(*(t.to(device) for t in (self.ids, self.keep, self.targets, self.weights)))


@dataclass(frozen=True)
class Stage:
    """Up to `until` (a fraction of the run) documents are drawn by `mixture` and cut at `length` tokens."""

    until: float
    mixture: Mixture
    length: int


def weigh(tokenizer: Tokenizer, doc: Document, length: int) -> TokenizedDocument:
    """Tokenize a document and spread its character weights over its tokens."""
    ids, starts = ids_and_starts(tokenizer, doc.text)
    weights = [0.0] * len(ids)
    for begin, end, weight in doc.ranges:
        # a decision is made by the token that its range begins in, which may have begun before it (`", "`)
        index = bisect_right(starts, begin) - 1 if weight > PLAIN else bisect_left(starts, begin)
        while index < len(starts) and starts[index] < end:
            weights[index] = weight
            index += 1
    return TokenizedDocument(ids[:length], weights[:length], starts[:length])


def collate(samples: Sequence[TokenizedDocument]) -> TrainingBatch:
    """Samples as one padded batch."""
    length = max(len(s.ids) for s in samples)
    ids = torch.full((len(samples), length), END_OF_TEXT, dtype=torch.long)
    keep, targets, weights = [], [], []
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        for i in range(1, len(sample.ids)):
            if sample.weights[i]:
                keep.append(row * length + i - 1)
                targets.append(sample.ids[i])
                weights.append(sample.weights[i])
    return TrainingBatch(ids, torch.tensor(keep), torch.tensor(targets), torch.tensor(weights))


class BatchStream:
    """An endless, seeded stream of batches. Its state is `(seed, drawn)`: documents are numbered, so that a
    resumed run goes on with the documents it had not seen."""

    def __init__(
        self, tokenizer: Tokenizer, stages: Sequence[Stage], seed: int, tokens: int, library: Source | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.stages = stages
        self.seed = seed
        self.tokens = tokens
        self.drawn = 0
        self.side = Side(evaluation=False)
        self.library: Source = library or Library(evaluation=False)
        self.ready: list[TrainingBatch] = []

    def next(self, progress: float) -> TrainingBatch:
        """The next batch for a run that is `progress` (0 to 1) through."""
        if not self.ready:
            self._fill(next(s for s in self.stages if progress <= s.until))
        return self.ready.pop()

    def _fill(self, stage: Stage) -> None:
        kinds, shares = list(stage.mixture), list(stage.mixture.values())
        samples, total = [], 0
        while total < 12 * self.tokens:
            rng = Random(f"{self.seed}:{self.drawn}")
            self.drawn += 1
            kind = rng.choices(kinds, shares)[0]
            doc = self.library.document(rng) if kind == "text" else make(kind, rng, self.side)
            sample = weigh(self.tokenizer, doc, stage.length)
            if any(sample.weights[1:]):  # a long prompt may leave nothing to learn before the cut
                samples.append(sample)
                total += len(sample.ids)
        samples.sort(key=lambda s: len(s.ids))
        rows: list[TokenizedDocument] = []
        for sample in samples:
            if rows and len(sample.ids) * (len(rows) + 1) > self.tokens:
                self.ready.append(collate(rows))
                rows = []
            rows.append(sample)
        self.ready.append(collate(rows))
        Random(f"{self.seed}:{self.drawn}:order").shuffle(self.ready)
