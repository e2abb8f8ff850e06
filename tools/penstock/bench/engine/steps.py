"""What a step costs beside the model: the real engine, scheduler and streams over a model that answers at once.

`step_overhead_us` counts all of it: planning, the way to the engine's thread and back, taking the tokens in, and one
reader per stream that wakes up for each of its tokens. Over a real model the readers' part happens while the next step
computes; `step_gap_us` is how long a model waits between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from statistics import median

import torch

from penstock.checkpoint import Checkpoint
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Chosen
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.kv.spec import KvSpec

_ROUNDS = 9


class _Stand:
    """Computes nothing, for `busy_s` seconds a step: every token is the same. Notes the times between steps."""

    packed = None

    def __init__(self, memory: PageMemory, busy_s: float) -> None:
        self.memory = memory
        self.gaps: list[float] = []
        self._busy_s = busy_s
        self._ended = 0.0

    def step(self, runs: Sequence[Run]) -> list[list[Chosen]]:
        self.gaps.append(time.perf_counter() - self._ended)
        if self._busy_s:
            time.sleep(self._busy_s)
        answers = [[Chosen(0)] * run.samples for run in runs]
        self._ended = time.perf_counter()
        return answers


async def step_overhead_us(model: Path, batch: int, steps: int = 200, rounds: int = _ROUNDS) -> list[float]:
    """Microseconds per step of `batch` greedy streams, one number per round of `steps` steps; `model` is a directory
    whose weights are not read."""
    samples = []
    async with _engine(model, batch, 0.0) as (engine, _):
        for round in range(rounds):
            before, begin = engine.stats().steps, time.perf_counter()
            await _crowd(engine, f"{round}", batch, steps)
            samples.append((time.perf_counter() - begin) / (engine.stats().steps - before) * 1e6)
    return samples


async def step_gap_us(
    model: Path, batch: int, steps: int = 100, rounds: int = _ROUNDS, busy_s: float = 0.002
) -> list[float]:
    """Microseconds that a model which takes `busy_s` waits between two steps of `batch` greedy streams: the median of
    each round of `steps` steps; `model` as above."""
    samples = []
    async with _engine(model, batch, busy_s) as (engine, stand):
        for round in range(rounds):
            stand.gaps.clear()
            await _crowd(engine, f"{round}", batch, steps)
            samples.append(median(stand.gaps) * 1e6)
    return samples


@asynccontextmanager
async def _engine(model: Path, batch: int, busy_s: float) -> AsyncIterator[tuple[Engine, _Stand]]:
    made: list[_Stand] = []

    def load(config: EngineConfig, checkpoint: Checkpoint) -> tuple[_Stand, KvSpec]:
        pages = -(-config.kv_pool_tokens // config.block_size)
        memory = PageMemory(checkpoint.config, pages, config.block_size, torch.float32, torch.device("cpu"))
        made.append(_Stand(memory, busy_s))
        return made[0], KvSpec(
            model="",
            tokenizer="",
            layout=memory.layout,
            dtype=config.dtype,
            block_size=config.block_size,
            block_bytes=memory.block_bytes,
        )

    config = EngineConfig(model, max_running=batch, max_batch_tokens=max(512, batch), draft_tokens=0)
    async with Engine.open(config, load=load) as engine:
        yield engine, made[0]


async def _crowd(engine: Engine, name: str, streams: int, tokens: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(_read(engine, f"{name}/{number}", tokens))


async def _read(engine: Engine, name: str, tokens: int) -> None:
    request = Request(name, (1,), SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    async with aclosing(engine.generate(request)) as updates:
        async for _ in updates:
            pass
