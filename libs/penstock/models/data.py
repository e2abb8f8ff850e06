"""From documents to batches: a mixture that changes with progress, token weights, rows that are packed or padded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .render import PLAIN, Document
from .sessions import make
from .text import Library
from .tokenizer import END_OF_TEXT, ids_and_starts
from .words import Side

Mixture = Mapping[str, float]


@dataclass(frozen=True)
class Emphasis:
    """How much what is no choice of the assistant's counts, beside 1 for a plain token that it writes."""

    text: float = 1.0  # plain English
    foretold: float = 0.0  # words of a tool's name and keys that its description has
    differing: float = 0.0  # where a call's name stops being like that of another tool, if that is after its beginning


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
    """Padded rows, for what looks at one text at a time; `keep` are the flat positions whose next token carries
    weight."""

    ids: Tensor  # (rows, length)
    keep: Tensor  # (kept,) flat index into (rows, length)
    targets: Tensor  # (kept,)
    weights: Tensor  # (kept,)
    tokens: int  # without the padding

    def to(self, device: torch.device) -> TrainingBatch:
        ids, keep, targets, weights = (t.to(device) for t in (self.ids, self.keep, self.targets, self.weights))
        return TrainingBatch(ids, keep, targets, weights, self.tokens)


@dataclass(frozen=True)
class Spans:
    """Where documents lie that stand one behind the other."""

    bounds: Tensor  # (documents + 1,) int32: where each begins, and where the last one ends
    longest: int  # no document has more tokens

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Spans:
        """Those of documents of these lengths, in their order."""
        return cls(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))

    @property
    def lengths(self) -> list[int]:
        """The tokens of each document, in their order."""
        lengths: list[int] = self.bounds.diff().tolist()
        return lengths


@dataclass(frozen=True)
class PackedBatch:
    """Documents one behind the other; `keep` are the positions whose next token carries weight."""

    ids: Tensor  # (tokens,)
    spans: Spans
    keep: Tensor  # (kept,)
    targets: Tensor  # (kept,)
    weights: Tensor  # (kept,)

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    def to(self, device: torch.device) -> PackedBatch:
        if device.type == self.ids.device.type:
            return self
        tensors = (self.ids, self.spans.bounds, self.keep, self.targets, self.weights)
        ids, bounds, keep, targets, weights = (t.to(device) for t in tensors)
        return PackedBatch(ids, Spans(bounds, self.spans.longest), keep, targets, weights)


@dataclass(frozen=True)
class Stage:
    """Up to `until` (a fraction of the run) documents are drawn by `mixture` and cut at `length` tokens."""

    until: float
    mixture: Mixture
    length: int


def weigh(tokenizer: Tokenizer, doc: Document, length: int, emphasis: Emphasis = Emphasis()) -> TokenizedDocument:
    """Tokenize a document and spread its character weights over its tokens."""
    ids, starts = ids_and_starts(tokenizer, doc.text)
    weights = [0.0] * len(ids)
    foretold = ((*place, emphasis.foretold) for place in doc.foretold)
    differing = ((*place, emphasis.differing) for place in doc.differing if emphasis.differing)
    for begin, end, weight in chain(foretold, doc.ranges, differing):
        # a decision is made by the token that its range begins in, which may have begun before it (`", "`)
        index = bisect_right(starts, begin) - 1 if weight > PLAIN else bisect_left(starts, begin)
        while index < len(starts) and starts[index] < end:
            weights[index] = weight
            index += 1
    if doc.kind == "text":
        weights = [emphasis.text * weight for weight in weights]
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
    total = sum(len(s.ids) for s in samples)
    return TrainingBatch(ids, torch.tensor(keep), torch.tensor(targets), torch.tensor(weights), total)


def pack(samples: Sequence[TokenizedDocument]) -> PackedBatch:
    """Samples one behind the other."""
    spans = Spans.of([len(s.ids) for s in samples])
    ids = torch.from_numpy(np.concatenate([np.asarray(s.ids, np.int64) for s in samples]))
    weights = torch.from_numpy(np.concatenate([np.asarray(s.weights, np.float32) for s in samples]))
    weights[spans.bounds[:-1]] = 0.0  # nothing says what a document begins with
    at = weights.nonzero().flatten()
    return PackedBatch(ids, spans, at - 1, ids[at], weights[at])


class DocumentStream:
    """An endless, seeded stream of documents. Its state is `(seed, drawn)`: documents are numbered, and each depends on
    its number and on the stage alone, so that a resumed run goes on with the very next one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stages: Sequence[Stage],
        seed: int,
        library: Source | None = None,
        emphasis: Emphasis = Emphasis(),
    ) -> None:
        self.tokenizer = tokenizer
        self.stages = stages
        self.seed = seed
        self.emphasis = emphasis
        self.drawn = 0
        self.side = Side(evaluation=False)
        self.library: Source = library or Library(evaluation=False)

    def take(self, progress: float, tokens: int) -> list[TokenizedDocument]:
        """The next documents for a run that is `progress` (0 to 1) through: the fewest with so many tokens."""
        stage = next(s for s in self.stages if progress <= s.until)
        samples: list[TokenizedDocument] = []
        total = 0
        while total < tokens:
            sample = self._next(stage)
            self.drawn += 1
            if np.any(sample.weights[1:]):  # a long prompt may leave nothing to learn before the cut
                samples.append(sample)
                total += len(sample.ids)
        return samples

    def close(self) -> None:
        """The end; nothing is held here."""

    def _next(self, stage: Stage) -> TokenizedDocument:
        return self.draw(self.drawn, stage)

    def draw(self, number: int, stage: Stage) -> TokenizedDocument:
        """The document of this number in a stage."""
        rng = Random(f"{self.seed}:{number}")
        kind = rng.choices(list(stage.mixture), list(stage.mixture.values()))[0]
        doc = self.library.document(rng) if kind == "text" else make(kind, rng, self.side)
        return weigh(self.tokenizer, doc, stage.length, self.emphasis)


class BatchStream:
    """Batches of padded rows of nearly equal lengths, each of at most so many tokens with its padding."""

    def __init__(self, documents: DocumentStream, tokens: int) -> None:
        self.documents = documents
        self.tokens = tokens
        self.ready: list[TrainingBatch] = []

    def next(self, progress: float) -> TrainingBatch:
        """The next batch for a run that is `progress` (0 to 1) through."""
        if not self.ready:
            self._fill(progress)
        return self.ready.pop()

    def _fill(self, progress: float) -> None:
        samples = sorted(self.documents.take(progress, 12 * self.tokens), key=lambda s: len(s.ids))
        rows: list[TokenizedDocument] = []
        for sample in samples:
            if rows and len(sample.ids) * (len(rows) + 1) > self.tokens:
                self.ready.append(collate(rows))
                rows = []
            rows.append(sample)
        self.ready.append(collate(rows))
        Random(f"{self.documents.seed}:{self.documents.drawn}:order").shuffle(self.ready)
