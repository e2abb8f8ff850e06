"""What rank 0 tells the others: how the engine is set up, then each step.

Messages go over a socket, each as four bytes of length and its content. Nobody else can write to it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.config import EngineConfig
from penstock.engine.step.batch import Rows
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
    """The first message."""

    rank: int
    ranks: int
    config: dict[str, Any]
    fingerprint: str
    """Of the model."""
    pages: SharedMemory
    sums: SharedMemory | None
    """Where ranks add what they compute, see SharedGroup; None: by torch.distributed."""
    meeting: str
    """A file in a private directory, by which they find each other then."""

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


class ToldStep(msgspec.Struct, array_like=True):
    """A step. What is sampled after it comes with the next."""

    runs: list[ToldRun]
    compiled: bool
    """Whether the kernels compute it in one call."""


@dataclass(slots=True)
class Followed:
    """A run as a follower has it, see Run."""

    ids: Sequence[int]
    start: int
    samples: int
    table: tuple[str, int]
    pages: Sequence[int]
    adapter: None = field(default=None, init=False)
    tokens: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = len(self.ids)
        self.end = self.start + self.tokens


_Name = tuple[str, int, int]


class StepTeller:
    """Turns steps into messages. A block table is told again when it is not that of the step before."""

    def __init__(self) -> None:
        self._known: set[_Name] = set()
        self._encoder = msgspec.msgpack.Encoder()

    def tell(self, order: Sequence[Rows], compiled: bool) -> bytes:
        """The message of a step."""
        runs, known = [], set()
        for run in order:
            name = (*run.table, len(run.pages))
            pages = None if name in self._known else list(run.pages)
            known.add(name)
            runs.append(ToldRun(run.ids, run.start, run.samples, run.table, len(run.pages), pages))
        self._known = known
        return self._encoder.encode(ToldStep(runs, compiled))


class StepListener:
    """Turns messages into steps."""

    def __init__(self) -> None:
        self._known: dict[_Name, list[int]] = {}
        self._decoder = msgspec.msgpack.Decoder(ToldStep)

    def hear(self, message: bytes | bytearray) -> tuple[list[Followed], bool]:
        """The runs of a step, and whether the kernels compute it."""
        told, runs, known = self._decoder.decode(message), [], {}
        for run in told.runs:
            name = (*run.table, run.length)
            pages = self._known[name] if run.pages is None else run.pages
            known[name] = pages
            runs.append(Followed(run.ids, run.start, run.samples, run.table, pages))
        self._known = known
        return runs, told.compiled


def send(to: socket.socket, content: bytes) -> None:
    """Raises OSError."""
    to.sendall(len(content).to_bytes(_HEADER, "big") + content)


def receive(source: socket.socket) -> bytearray:
    """Waits for a message. Raises EOFError when there is no other side any more, OSError."""
    return receive_exactly(source, int.from_bytes(receive_exactly(source, _HEADER), "big"))
