"""What rank 0 tells the others: how the engine is set up, then each step, and adapters that steps need.

Messages go over a socket, each as four bytes of length and its content. Nobody else can write to it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.checkpoint import ExpertCopies
from penstock.engine.config import EngineConfig
from penstock.engine.layers.adapters import AdapterWeights
from penstock.engine.pictures.shown import ShownRows
from penstock.engine.step.batch import Rows
from penstock.engine.step.pictures import PictureRows, Stretch, Turning
from penstock.kv.bytes.arena import Arena, ArenaMap, Layout
from penstock.runtime.exactly import receive_exactly

_HEADER = 4


class SharedMemory(msgspec.Struct, array_like=True, frozen=True):
    """An arena of rank 0."""

    path: str
    size: int
    arena_id: bytes

    @classmethod
    def of(cls, arena: Arena) -> SharedMemory:
        return cls(arena.path, arena.size, arena.arena_id)

    def mapped(self, layout: Layout) -> ArenaMap:
        """Raises MapError."""
        return ArenaMap(self.path, self.size, self.arena_id, layout)


class Setup(msgspec.Struct, frozen=True):
    """The first message. Where there are several stages, the pipes of this one come with the next byte, see stages."""

    rank: int
    """Among those of its stage."""
    ranks: int
    stage: int
    stages: list[tuple[int, int]]
    """The first layer of each, and the one behind its last."""
    config: dict[str, Any]
    fingerprint: str
    """Of the model."""
    pages: SharedMemory
    sums: SharedMemory | None
    """Where the ranks of its stage add what they compute, see SharedGroup; None: by torch.distributed."""
    passing: SharedMemory | None
    """Where stages pass on what they have computed; None: there is one."""
    meeting: str
    """A file in a private directory, by which they find each other then; else empty."""
    copies: ExpertCopies | None = None
    """See Rank."""
    tells: int = 0
    """Pipes to which it writes, one for each rank of the next stage."""
    taps: tuple[int, ...] = ()
    """Of several stages: after how many layers of the model states are kept, see Features."""

    @property
    def pipes(self) -> int:
        """How many it gets, see stages."""
        return (self.stage > 0) + self.tells

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(**{**self.config, "model": Path(self.config["model"])})


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """The settings as a message has them."""
    return {one.name: getattr(config, one.name) for one in fields(config) if one.init} | {"model": str(config.model)}


class ToldRun(msgspec.Struct, array_like=True):
    """Consecutive tokens of one sequence."""

    ids: Sequence[int]
    start: int
    samples: int
    table: tuple[str, int]
    length: int
    """Pages in the table."""
    pages: list[int] | None
    """None: as in the step before."""
    adapter: str
    """The fingerprint of a loaded one; empty: none."""
    stretches: list[Stretch]
    """Of its sequence, see Turning."""
    featured_tokens: int
    """How many of its last tokens have features."""


class PassedAt(NamedTuple):
    """Where several stages pass on a piece of a step, see PassedOn."""

    place: int = 0
    row: int = 0
    """The first one of it there; likewise the others."""
    sample: int = 0
    feature: int = 0


_ALONE = PassedAt()


class ToldStep(msgspec.Struct, array_like=True, tag="step"):
    """A step, or a piece of it. What is sampled after it comes with the next."""

    runs: list[ToldRun]
    compiled: bool
    """Whether the kernels compute it in one call."""
    forgotten: list[str]
    """Adapters that are needed no more, by their fingerprints."""
    at: PassedAt
    shown: list[int]
    """Rows that have embeddings of pictures. To the ranks of the first stage these come in the next message."""
    written: list[int] = []
    """Pages that rank 0 has written since the step before, for stages and ranks that have other memory."""
    cleared: list[int] = []
    """Likewise, of zeros."""


class ToldAdapter(msgspec.Struct, array_like=True, tag="adapter"):
    """An adapter to load."""

    path: str
    fingerprint: str
    forgotten: list[str]
    """As of a step; these go before it is loaded."""


@dataclass(slots=True)
class PlainRows:
    """A run as a follower has it, or a part of one, see Run."""

    ids: Sequence[int]
    start: int
    samples: int
    table: tuple[str, int]
    pages: Sequence[int]
    adapter: AdapterWeights | None
    pictures: PictureRows | None = None
    """Known to rank 0 alone."""
    turning: Turning | None = None
    featured_tokens: int = 0
    tokens: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = len(self.ids)
        self.end = self.start + self.tokens


class FollowedStep(NamedTuple):
    """A step as a follower has it."""

    runs: list[PlainRows]
    compiled: bool
    at: PassedAt
    shown: list[int]
    written: list[int]
    cleared: list[int]


_Name = tuple[str, int, int]


class StepTeller:
    """Turns steps into messages. A block table is told again when it is not that of the step before."""

    def __init__(self) -> None:
        self._known: set[_Name] = set()
        self._encoder = msgspec.msgpack.Encoder()

    def adapter(self, path: Path, fingerprint: str, forgotten: list[str]) -> bytes:
        """The message of an adapter to load."""
        return self._encoder.encode(ToldAdapter(str(path), fingerprint, forgotten))

    def tell(
        self,
        order: Sequence[Rows],
        compiled: bool,
        forgotten: list[str],
        *,
        at: PassedAt = _ALONE,
        shown: ShownRows | None = None,
        changed: tuple[list[int], list[int]] = ([], []),
    ) -> bytes:
        """The message of a step. `changed` are the pages that were written and cleared since the one before."""
        runs, known = [], set()
        for run in order:
            name = (*run.table, len(run.pages))
            pages = None if name in self._known else list(run.pages)
            known.add(name)
            adapter = "" if run.adapter is None else run.adapter.fingerprint
            turns = [] if run.turning is None else run.turning.stretches
            told = (run.ids, run.start, run.samples, run.table, len(run.pages), pages, adapter, turns)
            runs.append(ToldRun(*told, run.featured_tokens))
        self._known = known
        rows = [] if shown is None else shown.rows.tolist()
        return self._encoder.encode(ToldStep(runs, compiled, forgotten, at, rows, *changed))


class TableListener:
    """Reads messages, and says of each run which pages it has."""

    def __init__(self) -> None:
        self._known: dict[_Name, list[int]] = {}
        self._decoder: msgspec.msgpack.Decoder[ToldStep | ToldAdapter] = msgspec.msgpack.Decoder(ToldStep | ToldAdapter)

    def hear(self, message: bytes | bytearray) -> tuple[ToldStep, list[list[int]]] | ToldAdapter:
        """A step with the pages of each run, or the adapter that is to be loaded."""
        told = self._decoder.decode(message)
        if isinstance(told, ToldAdapter):
            return told
        known: dict[_Name, list[int]] = {}
        tables = []
        for run in told.runs:
            name = (*run.table, run.length)
            known[name] = pages = self._known[name] if run.pages is None else run.pages
            tables.append(pages)
        self._known = known
        return told, tables


class StepListener:
    """Turns messages into steps, and has the adapters that these name."""

    def __init__(self) -> None:
        self._tables = TableListener()
        self._adapters: dict[str, AdapterWeights] = {}

    def hear(self, message: bytes | bytearray) -> FollowedStep | ToldAdapter:
        """A step, or the adapter that is to be loaded: `keep` takes it then."""
        heard = self._tables.hear(message)
        told = heard if isinstance(heard, ToldAdapter) else heard[0]
        for fingerprint in told.forgotten:
            self._adapters.pop(fingerprint, None)
        if isinstance(heard, ToldAdapter):
            return heard
        told, tables = heard
        runs = [self._run(run, pages) for run, pages in zip(told.runs, tables, strict=True)]
        return FollowedStep(runs, told.compiled, told.at, told.shown, told.written, told.cleared)

    def keep(self, adapter: AdapterWeights) -> None:
        """Steps may name it from now on."""
        self._adapters[adapter.fingerprint] = adapter

    def _run(self, run: ToldRun, pages: list[int]) -> PlainRows:
        adapter = self._adapters[run.adapter] if run.adapter else None
        turning = Turning(run.stretches) if run.stretches else None
        own = (run.ids, run.start, run.samples, run.table, pages, adapter)
        return PlainRows(*own, turning=turning, featured_tokens=run.featured_tokens)


def send(to: socket.socket, content: bytes) -> None:
    """Raises OSError."""
    to.sendall(len(content).to_bytes(_HEADER, "big") + content)


def receive(source: socket.socket) -> bytearray:
    """Waits for a message. Raises EOFError when there is no other side any more, OSError."""
    return receive_exactly(source, int.from_bytes(receive_exactly(source, _HEADER), "big"))
