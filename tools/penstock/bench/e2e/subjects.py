"""The servers of one run: all started, one of them under load at a time, the others stopped or idle."""

from __future__ import annotations

import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.e2e import processes
from penstock.bench.e2e.cells import LoadCell, Values, values
from penstock.bench.e2e.loads import LoadStage, PlainLoad
from penstock.bench.e2e.running import Server, free_port, serving
from penstock.bench.e2e.servers import MESHES, mesh, peer
from penstock.bench.engine.process import Failed
from penstock.bench.engine.shapes import LlamaShape
from penstock.bench.engine.subjects import Places
from penstock.load.asking import AskFailed

_WARM_UP = PlainLoad(streams=4, prompt=600, output=8)


@dataclass(frozen=True, slots=True)
class ServerSample:
    """One round of one server in one cell; without values, why there are none."""

    values: Values = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServerRow:
    """All rounds of one server in one cell, and the mesh's in the same rounds."""

    cell: str
    server: str
    samples: Sequence[ServerSample]
    mesh: Sequence[ServerSample] = ()
    """Of `MESH`; empty when it was not measured."""

    def of(self, value: str) -> list[float]:
        """One value, of the rounds that have it."""
        return [sample.values[value] for sample in self.samples if value in sample.values]

    def ratios(self, value: str) -> list[float]:
        """The mesh's : this server's, of the rounds in which both were measured."""
        return [
            ours.values[value] / theirs.values[value]
            for ours, theirs in zip(self.mesh, self.samples, strict=bool(self.mesh))
            if value in ours.values and theirs.values.get(value)
        ]

    @property
    def absent(self) -> str:
        """Why a round has no values; empty when all have."""
        return next((sample.reason for sample in self.samples if sample.reason), "")

    @property
    def told(self) -> str:
        """One line for the terminal."""
        rates = self.of("output_token_throughput")
        return f"{statistics.median(rates):.4g} tokens/s" if rates else self.absent


@dataclass(frozen=True, slots=True)
class Sources:
    """Where servers come from, and what they serve."""

    shape: LlamaShape
    model: Path
    places: Places

    @asynccontextmanager
    async def open(self, name: str, *more: str) -> AsyncIterator[Server]:
        """A server, warm; `more` are further options of a mesh. Raises Failed."""
        port = free_port()
        ours = name in MESHES
        spec = mesh(name, self.model, port, *more) if ours else peer(name, self.model, port, self.places)
        async with serving(spec, port) as server:
            try:
                await _WARM_UP.run(LoadStage(server.target, self.shape.vocab), "warm-up")
            except AskFailed as error:
                raise Failed(f"{name} is ready and does not answer: {error}") from None
            yield server


class Subjects:
    """Made by `opened`."""

    def __init__(self, running: Mapping[str, Server], absent: Mapping[str, str]) -> None:
        self.running = running
        self.absent = absent
        """Why the others are not there."""

    async def sample(self, name: str, cell: LoadCell, shape: LlamaShape, round: int) -> ServerSample:
        """Loads one server."""
        if name in self.absent:
            return ServerSample(reason=self.absent[name])
        server = self.running[name]
        server.go_on()
        try:
            before = processes.cpu_s(server.pids)
            parts = await cell.run(LoadStage(server.target, shape.vocab), round)
            used = processes.cpu_s(server.pids) - before
            found = values(parts)
            tokens = sum(record.tokens for part in parts.values() for record in part)
            found["cpu_s_per_1k"] = used / tokens * 1e3
            found["memory_mb"] = processes.memory_bytes(server.pids) / 1e6
        except AskFailed as error:
            return ServerSample(reason=str(error))
        finally:
            server.pause()
        return ServerSample(found)


@asynccontextmanager
async def opened(names: Sequence[str], sources: Sources) -> AsyncIterator[Subjects]:
    """All servers of these names that can be started."""
    running: dict[str, Server] = {}
    absent: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            try:
                running[name] = await stack.enter_async_context(sources.open(name))
            except Failed as error:
                absent[name] = str(error)
                print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
                continue
            running[name].pause()
            print(f"{name}: ready after {running[name].ready_s:.1f} s", file=sys.stderr, flush=True)
        yield Subjects(running, absent)
