"""A model whose layers are divided among stages: each passes what it has made of a step's rows on to the next.

The rows lie in memory that all ranks of the host map, and so do the logits that the last stage makes of them. A byte in
a pipe says that rows are there: each rank of a stage has a pipe of its own, to which the first rank of the stage before
writes. Pieces come in the order in which rank 0 has told of them, so nothing else needs to be said.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.ranks.messages import PassedAt, PlainRows
from penstock.engine.step.batch import Rows
from penstock.engine.step.features import Features
from penstock.kv.bytes.arena import Layout

_FLOAT, _COUNT = 4, 8
_FDS = b"f"
_LEAST = 128
"""Rows of prompts in a piece of a step: fewer take longer for each."""
_PIECES = 2
"""Of a step, for each stage: while the first is in the last stage, others follow it."""
_MOST_CUT = 1
"""Samples of a run that is cut: a prompt's. Rows that verify drafts stay together."""


class PassedOn(NamedTuple):
    """Views of what stages pass on."""

    states: Tensor
    """float32 [stages - 1, places, rows, hidden]."""
    logits: Tensor
    """float32 [places, rows, vocab]."""
    features: Tensor
    """float32 [places, rows, taps, hidden]."""
    counted: NDArray[np.int64]
    """[layers, experts]: how many rows have chosen each so far. The first rank of each stage counts for its layers."""


@dataclass(frozen=True, slots=True)
class PassingRoom:
    """How much stages pass on at a time."""

    stages: int
    rows: int
    hidden: int
    vocab: int
    layers: int = 0
    experts: int = 0
    """Of each layer; 0: there are none."""
    taps: int = 0
    """How many states features are."""

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, taps: Sequence[int]) -> PassingRoom:
        """For the whole model; for `taps` see Setup."""
        experts = 0 if model.experts is None else model.experts.count
        return cls(
            config.pp,
            config.max_batch_tokens,
            model.hidden_size,
            model.vocab_size,
            layers=model.n_layers,
            experts=experts,
            taps=len(taps),
        )

    @property
    def places(self) -> int:
        """Steps that are computed at a time, at most."""
        return self.stages

    @property
    def layout(self) -> Layout:
        """Of the arena: all is in one slot. What is not used takes no memory."""
        row = (self.stages - 1 + self.taps) * self.hidden + self.vocab
        return Layout.gapless(1, self._counts * _COUNT + self.places * self.rows * row * _FLOAT)

    @property
    def _counts(self) -> int:
        return self.layers * self.experts

    def views(self, content: memoryview) -> PassedOn:
        """What is in the slot."""
        counted = np.frombuffer(content, np.int64, self._counts).reshape(self.layers, self.experts)
        floats = torch.frombuffer(content, dtype=torch.float32, offset=self._counts * _COUNT)
        rows = self.places * self.rows
        sizes = [(self.stages - 1) * rows * self.hidden, rows * self.taps * self.hidden, rows * self.vocab]
        states, features, logits = torch.split(floats, sizes)
        return PassedOn(
            states.view(self.stages - 1, self.places, self.rows, self.hidden),
            logits.view(self.places, self.rows, self.vocab),
            features.view(self.places, self.rows, self.taps, self.hidden),
            counted,
        )


def taps_of(taps: Sequence[int], layers: range) -> slice:
    """Those behind these layers, of growing numbers of layers."""
    return slice(bisect_right(taps, layers.start), bisect_right(taps, layers.stop))


def put_features(room: Tensor, at: PassedAt, taps: slice, features: Features) -> None:
    """Passes on what the layers of a stage say of a piece; `room` is that of PassedOn, `taps` are the stage's."""
    rows = room[at.place, at.feature : at.feature + len(features.rows), taps]
    rows.copy_(features.values.view(rows.shape))


class Pipes:
    """The pipes of one rank."""

    def __init__(self, source: int | None, to: Sequence[int]) -> None:
        """It reads from `source`, if there is a stage before, and writes to those of the next. Owns all."""
        self._source, self._to = source, to

    def wait(self) -> None:
        """Returns when the stage before has passed something on. Raises RankLost when it never will."""
        assert self._source is not None
        if not os.read(self._source, 1):
            raise RankLost("the stage before has ended")

    def tell(self) -> None:
        """Something is there for the next stage. Raises RankLost."""
        try:
            for to in self._to:
                os.write(to, b".")
        except OSError as error:
            raise RankLost(f"the next stage has ended: {error}") from error

    def send(self, to: socket.socket) -> None:
        """Gives them to the process at the other end, and closes them here. Raises OSError."""
        try:
            if files := [*self._files]:
                socket.send_fds(to, [_FDS], files)
        finally:
            self.close()

    @classmethod
    def receive(cls, source: socket.socket, count: int, *, reads: bool) -> Pipes:
        """Those that the other side gives; `reads`: the first of them is read from. Raises EOFError, OSError."""
        if not count:
            return cls(None, ())
        said, files, _, _ = socket.recv_fds(source, 1, count)
        if said != _FDS or len(files) != count:
            for file in files:
                os.close(file)
            raise EOFError
        return cls(files[0], files[1:]) if reads else cls(None, files)

    @property
    def _files(self) -> Iterator[int]:
        if self._source is not None:
            yield self._source
        yield from self._to

    def close(self) -> None:
        """Whoever waits at the other ends hears of it."""
        for file in self._files:
            with suppress(OSError):
                os.close(file)
        self._source, self._to = None, ()


def pipes_between(speaking: Sequence[int]) -> list[list[Pipes]]:
    """Of each rank of each stage, of which there are so many in each."""
    reads: list[list[int | None]] = [[None] * speaking[0]]
    writes: list[list[int]] = []
    for count in speaking[1:]:
        pairs = [os.pipe() for _ in range(count)]
        reads.append([source for source, _ in pairs])
        writes.append([to for _, to in pairs])
    writes.append([])
    return [
        [Pipes(source, own if rank == 0 else ()) for rank, source in enumerate(sources)]
        for sources, own in zip(reads, writes, strict=True)
    ]


def pieces_of(order: Sequence[Rows], stages: int) -> list[list[Rows]]:
    """A step cut into pieces, one behind the other, so that stages compute them at the same time. A run may begin in
    one and go on in the next; decode rows are not worth that, and come together."""
    prompts = sum(run.tokens for run in order if run.tokens > 1 and run.samples <= _MOST_CUT)
    count = min(_PIECES * stages, prompts // _LEAST)
    if count < 2:
        return [[*order]]
    pieces: list[list[Rows]] = [[]]
    left = size = -(-sum(run.tokens for run in order) // count)
    for run in order:
        at = 0
        while run.tokens - at > left and run.samples <= _MOST_CUT and len(pieces) < count:
            pieces[-1].append(_cut(run, at, at + left))
            pieces.append([])
            at, left = at + left, size
        pieces[-1].append(_cut(run, at, run.tokens) if at else run)
        left -= run.tokens - at
        if left <= 0 and len(pieces) < count:
            pieces.append([])
            left = size
    return [piece for piece in pieces if piece]


def _cut(run: Rows, begin: int, end: int) -> PlainRows:
    """Some of a run's tokens."""
    samples = run.samples if end == run.tokens else 0
    ids, start = run.ids[begin:end], run.start + begin
    featured = max(0, end - max(begin, run.tokens - run.featured_tokens))
    return PlainRows(ids, start, samples, run.table, run.pages, run.adapter, run.pictures, run.turning, featured)
