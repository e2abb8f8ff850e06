"""What a step costs beside the model: the real engine, scheduler and streams over a model that answers at once.

All of it is counted: planning, the way to the engine's thread and back, taking the tokens in, and one reader per
stream that wakes up for each of its tokens. Over a real model most of that happens while the next step computes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import torch

from penstock.checkpoint import Checkpoint
from penstock.engine.batch import Run
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.pool import KvPool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampler import Chosen
from penstock.kv.identity import KvSpec

_ROUNDS = 9


class _Instant:
    """Computes nothing: every token is the same."""

    packed = None

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool

    def step(self, runs: Sequence[Run]) -> list[list[Chosen]]:
        return [[Chosen(0)] * run.samples for run in runs]


async def step_overhead_us(model: Path, batch: int, steps: int = 200, rounds: int = _ROUNDS) -> list[float]:
    """Microseconds per step of `batch` greedy streams, one number per round of `steps` steps; `model` is a directory
    whose weights are not read."""
    config = EngineConfig(model, max_running=batch, max_batch_tokens=max(512, batch))
    samples = []
    async with Engine.open(config, load=_load) as engine:
        for round in range(rounds):
            before, begin = engine.stats().steps, time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number in range(batch):
                    tasks.create_task(_read(engine, f"{round}/{number}", steps))
            samples.append((time.perf_counter() - begin) / (engine.stats().steps - before) * 1e6)
    return samples


async def _read(engine: Engine, name: str, tokens: int) -> None:
    request = Request(name, (1,), SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    async with aclosing(engine.generate(request)) as updates:
        async for _ in updates:
            pass


def _load(config: EngineConfig, checkpoint: Checkpoint) -> tuple[_Instant, KvSpec]:
    pages = -(-config.kv_pool_tokens // config.block_size)
    pool = KvPool(checkpoint.config, pages, config.block_size, torch.float32, torch.device("cpu"))
    return _Instant(pool), KvSpec("", "", pool.layout, config.dtype, config.block_size, pool.block_bytes)
