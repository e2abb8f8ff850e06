"""What two hosts say to each other that compute stages of one model.

The host of rank 0, the worker's, has all pages; the other one has those of its stage's layers as well, in memory of its
own. So with each step goes what rank 0 has written to pages since the last one, and with its answer comes back what the
stage has made of the step's tokens: blocks are the same, and found, sent and lent by the worker, as if all were one
host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint import ModelConfig
from penstock.engine.config import EngineConfig, kv_token_bytes
from penstock.engine.ranks.messages import ToldStep
from penstock.engine.step.places import token_places
from penstock.kv.bytes.arena import Layout

_Bytes = NDArray[np.uint8]


PORTION = 16 << 20
"""Bytes of pages or vectors in a message, about."""


class Distance(Protocol):
    """The way to the other host."""

    def send(self, content: bytes) -> None:
        """Callable from any thread; may wait for room. What is sent after the end goes nowhere."""
        ...

    def receive(self) -> bytes:
        """Waits for a message. Raises EOFError when the other side has ended."""
        ...

    def close(self) -> None:
        """Ends it, for both sides. Callable from any thread."""
        ...


class PagesWritten(msgspec.Struct, array_like=True, tag="pages"):
    """To the stage: what its host has written to pages, before the step that has use of it; in portions."""

    pages: list[int]
    content: bytes
    """The stage's layers of these pages, one behind the other."""


class StageTold(msgspec.Struct, array_like=True, tag="told"):
    """To the stage: a message of rank 0."""

    message: bytes


class Given(msgspec.Struct, array_like=True, tag="given"):
    """To the stage: float32 [rows, hidden], what the stage before has made of a step."""

    states: bytes


class StatesPassed(msgspec.Struct, array_like=True, tag="passed"):
    """From the stage, likewise; the last one has none."""

    states: bytes


class VectorsKept(msgspec.Struct, array_like=True, tag="kept"):
    """From the stage: what its layers keep of a step's tokens, before the answer; in portions, in order."""

    vectors: bytes


class Answered(msgspec.Struct, array_like=True, tag="answered"):
    """From the stage, when it has loaded, and then to each message that it was told."""

    reason: str
    """Why it could not; empty: it did."""
    logits: bytes = b""
    """Of a step, from the last stage: float32 [samples, vocab]."""
    counted: bytes = b""
    """uint32 [layers of the stage, experts]: rows that have chosen each since the answer before."""
    features: bytes = b""
    """Of a step: float32 [rows that have some, taps of the stage, hidden]."""


class Leaving(msgspec.Struct, array_like=True, tag="leaving"):
    """From the stage: it ends soon, so the worker should want no new requests."""


ToStage = PagesWritten | StageTold | Given
FromStage = StatesPassed | VectorsKept | Answered | Leaving
TO_STAGE = msgspec.msgpack.Decoder(ToStage)
FROM_STAGE = msgspec.msgpack.Decoder(FromStage)
ENCODER = msgspec.msgpack.Encoder()


def fill(rows: NDArray[np.float32], content: bytes) -> None:
    """Makes rows what has come from the other host."""
    if rows.size:
        rows[:] = np.frombuffer(content, np.float32).reshape(rows.shape)


class PiecePlace(NamedTuple):
    """A piece of a step on its way."""

    place: int
    """As in ToldStep."""
    row: int
    rows: int
    sample: int
    samples: int
    feature: int
    features: int
    pages: NDArray[np.intp]
    """Of each token."""
    offsets: NDArray[np.intp]
    """Its place in the page."""

    @classmethod
    def of(cls, told: ToldStep, tables: list[list[int]], block_size: int) -> PiecePlace:
        """`tables`: the pages of each run."""
        runs = ((table, run.start, len(run.ids)) for run, table in zip(told.runs, tables, strict=True))
        pages, offsets = token_places(runs, block_size)
        place, row, sample, feature = told.at
        samples = sum(run.samples for run in told.runs)
        features = sum(run.featured_tokens for run in told.runs)
        return cls(place, row, len(pages), sample, samples, feature, features, pages, offsets)

    def in_features(self, taps: slice) -> tuple[int, slice, slice]:
        """Where those of a stage with these taps are, see PassedOn."""
        return self.place, slice(self.feature, self.feature + self.features), taps


class LayerPages:
    """Some layers of all pages."""

    def __init__(self, content: memoryview, model: ModelConfig, config: EngineConfig, layers: range) -> None:
        """`content` is that of an arena of `layout`."""
        vector = kv_token_bytes(config.kv, 1, model.kv) // model.kv.planes
        shape = (config.pages + 1, model.n_layers, model.kv.planes, config.block_size, vector)
        self._own: _Bytes = np.frombuffer(content, np.uint8).reshape(shape)[:, layers.start : layers.stop]
        self.block_size = config.block_size
        token = len(layers) * model.kv.planes * vector
        self.tokens = max(1, PORTION // token)
        """In a portion."""
        self.pages = max(1, self.tokens // self.block_size)
        """Likewise."""

    @staticmethod
    def layout(model: ModelConfig, config: EngineConfig) -> Layout:
        """Of an arena of pages of the whole model. Layers that nobody computes here are never touched, so they take no
        memory."""
        page = kv_token_bytes(config.kv, model.n_layers, model.kv) * config.block_size
        return Layout.gapless(config.pages + 1, page)

    def read(self, pages: list[int]) -> bytes:
        """These pages, one behind the other."""
        return self._own[pages].tobytes()

    def write(self, pages: list[int], content: bytes) -> None:
        """Makes them what `read` has said."""
        self._own[pages] = np.frombuffer(content, np.uint8).reshape(len(pages), *self._own.shape[1:])

    def clear(self, pages: list[int]) -> None:
        """Makes them zeros."""
        if pages:
            self._own[pages] = 0

    def vectors(self, piece: PiecePlace) -> Iterator[bytes]:
        """What the layers keep of each of a step's tokens, in portions."""
        for first in range(0, piece.rows, self.tokens):
            some = slice(first, first + self.tokens)
            yield self._own[piece.pages[some], :, :, piece.offsets[some]].tobytes()

    def keep(self, piece: PiecePlace, first: int, vectors: bytes) -> int:
        """Makes it what a portion has said, from token `first` on; the token behind it."""
        _, layers, planes, _, width = self._own.shape
        found = np.frombuffer(vectors, np.uint8).reshape(-1, layers, planes, width)
        some = slice(first, first + len(found))
        self._own[piece.pages[some], :, :, piece.offsets[some]] = found
        return some.stop
