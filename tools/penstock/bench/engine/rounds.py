"""Runs sessions: processes that take turns, round by round."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.engine.cells import Cell, Sitting, parts
from penstock.bench.engine.limits import Memory
from penstock.bench.engine.process import Failed, Talk
from penstock.bench.engine.shapes import ModelShape, checkpoint, weight_bytes
from penstock.bench.engine.subjects import Places, Subject, prepare, running
from penstock.bench.harness import interleave

THREADS = 2
BUDGET = 12 << 30
"""Bytes that the processes of one group may take, as far as can be estimated."""
_LOAD_S = 600.0
_PAUSE_S = 0.3
"""Before every sample: threads of the last one may still be spinning."""


@dataclass(frozen=True, slots=True)
class CellSample:
    """Tokens/s, and bytes/s that memory gave before and after; without a rate, why there is none."""

    rate: float | None
    memory: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CellRow:
    """Samples of one subject in one cell, and of the session's first subject in the same rounds."""

    shape: str
    cell: str
    subject: Subject
    samples: Sequence[CellSample]
    first: Sequence[CellSample]

    @property
    def absent(self) -> str:
        """Why the subject has no figure here; empty when it has one."""
        return next((sample.reason for sample in self.samples if sample.rate is None), "")

    @property
    def told(self) -> str:
        """One line about the samples, for the terminal."""
        rates = [sample.rate for sample in self.samples if sample.rate is not None]
        return f"{statistics.median(rates):.4g} tokens/s" if rates else self.absent


@dataclass
class Asked:
    """One subject's process: opened when it is first needed, and again after it failed."""

    subject: Subject
    places: Places
    shape: ModelShape
    values: Mapping[str, object]
    """Arguments of the `load` question."""
    reason: str = ""
    """Why it cannot be measured for the rest of a cell; empty while it can."""
    _talk: Talk | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def ask(self, do: str, limit_s: float, **values: object) -> Any:
        """Raises Failed."""
        try:
            if self._talk is None:
                self._talk = await self._open()
            return await self._talk.ask(do, limit_s, **values)
        except Failed:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the process."""
        self._talk = None
        await self._stack.aclose()

    async def _open(self) -> Talk:
        directory = checkpoint(self.shape, self.places.models)
        await prepare(self.subject, self.places, directory)
        talk = await self._stack.enter_async_context(running(self.subject, self.places))
        await talk.ask("load", _LOAD_S, checkpoint=str(directory), kind=self.subject.kind, **self.values)
        return talk


async def measure(session: Sitting, places: Places, memory: Memory) -> list[CellRow]:
    """All rows of a session. A subject that fails is left out of that cell, with its reason."""
    directory: Path = await asyncio.to_thread(checkpoint, session.shape, places.models)
    needs = session.needs
    values = {"threads": THREADS, "streams": needs.streams, "tokens": needs.tokens, "room": needs.room}
    rows: list[CellRow] = []
    for group in parts(session.subjects, weight_bytes(directory), BUDGET):
        asked = {one.name: Asked(one, places, session.shape, values) for one in group}
        try:
            for cell in session.cells:
                rows += await _cell(cell, session, asked, memory)
        finally:
            for one in asked.values():
                await one.close()
    return rows


async def _cell(cell: Cell, session: Sitting, asked: Mapping[str, Asked], memory: Memory) -> list[CellRow]:
    def subject(one: Asked) -> Any:
        one.reason = ""

        async def sample(number: int) -> CellSample:
            if one.reason:
                return CellSample(None, reason=one.reason)
            try:
                return await _sample(cell, session.shape, one, memory, number)
            except Failed as error:
                one.reason = str(error)
                return CellSample(None, reason=one.reason)

        return sample

    subjects = {name: subject(one) for name, one in asked.items()}
    found: dict[str, list[CellSample]] = await interleave(subjects, cell.rounds, warm_up=cell.warm_up)
    first = found[session.subjects[0].name]
    rows = [CellRow(session.shape.name, cell.name, one.subject, found[name], first) for name, one in asked.items()]
    for row in rows:
        print(f"{session.shape.name} {cell.name} {row.subject.name}: {row.told}", file=sys.stderr, flush=True)
    return rows


async def _sample(cell: Cell, shape: ModelShape, one: Asked, memory: Memory, number: int) -> CellSample:
    await asyncio.sleep(_PAUSE_S)
    before = memory.rate()
    if cell.steps:
        prompts = [prompt(shape, cell.tokens, stream) for stream in range(cell.streams)]
        seconds = await one.ask("decode", cell.limit_s, prompts=prompts, steps=cell.steps)
    else:
        seconds = await one.ask("prefill", cell.limit_s, prompt=prompt(shape, cell.tokens, (cell.name, number)))
    return CellSample(cell.work / seconds, (before + memory.rate()) / 2)


def prompt(shape: ModelShape, tokens: int, seed: object) -> list[int]:
    """Random token ids, the same for the same seed."""
    source = random.Random(repr(seed))
    return [source.randrange(300, shape.vocab) for _ in range(tokens)]
