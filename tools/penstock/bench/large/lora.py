"""Eight streams, each with an adapter of its own, beside eight streams of the base model: in one engine, in turns.

Greedy, without drafting, of short prompts. Adapters of rank 16 on all matrices of a layer, which is what most published
ones have. The base model has random weights in bfloat16 and the layers of a 1B model; and once more, it is the embedded
one, of whose bytes eight such adapters have more than half.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

from penstock.bench.engine.shapes import BIG, checkpoint
from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, figure, interleave
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.models import NAMES, embedded
from penstock.testing.adapters import write_adapter

STREAMS = 8
SHAPE = replace(BIG, name="1b-4-layers", layers=4, vocab=32064)
"""Four layers of a model of 1B, and as large a part of its last matrix."""
_RANK = 16
_PROMPT = 64
_GOAL = 0.8


async def lora_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    small = await asyncio.to_thread(checkpoint, SHAPE, Places.default().models)
    found = await _figures("lora_8_in_batch_vs_base", small, *((8, 2) if quick else (48, 7)), goal=_GOAL)
    tokens, rounds = (16, 2) if quick else (192, 7)
    return [*found, *await _figures("lora_8_in_batch_vs_base_embedded", embedded(NAMES[0]), tokens, rounds)]


async def _figures(id: str, model: Path, tokens: int, rounds: int, goal: float | None = None) -> list[Figure]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [str(number) for number in range(STREAMS)]
        for name in names:
            await asyncio.to_thread(write_adapter, directory / name, model, rank=_RANK, seed=int(name), strength=0.1)
        config = EngineConfig(
            model,
            dtype="bfloat16",
            threads=os.cpu_count() or 0,
            draft_tokens=0,
            lora=tuple(f"{name}={directory / name}" for name in names),
        )
        engine = await stack.enter_async_context(Engine.open(config))
        streams = AdaptedStreams(engine, tokens)
        own = [engine.adapters.names[name] for name in names]
        subjects = {"base": lambda number: streams.rate([""] * STREAMS), "lora": lambda number: streams.rate(own)}
        samples = await interleave(subjects, rounds)
    what = f"8 streams of the base model, {model.name}, in the same engine"
    ratios = [with_adapters / base for with_adapters, base in zip(samples["lora"], samples["base"], strict=True)]
    return [
        figure(id, ratios, "x", what, goal),
        *(figure(f"{id}_{name}_tok_s", samples[name], "tok/s", "") for name in subjects),
    ]


class AdaptedStreams:
    """AdaptedStreams of one engine that decode together."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        """Each has so many tokens."""
        self._engine = engine
        self._tokens = tokens
        self._asked = 0

    async def rate(self, adapters: Sequence[str]) -> float:
        """Tokens per second of one stream for each adapter, from when all have their first token."""
        started, begun, at = asyncio.Barrier(len(adapters)), 0, time.perf_counter()

        async def stream(adapter: str) -> None:
            nonlocal begun, at
            async with aclosing(self._engine.generate(self._request(adapter))) as updates:
                count = 0
                async for update in updates:
                    if not count:
                        await started.wait()
                        begun, at = self._engine.stats().generated_tokens, time.perf_counter()
                    count += len(update.tokens)

        async with asyncio.TaskGroup() as tasks:
            for adapter in adapters:
                tasks.create_task(stream(adapter))
        return (self._engine.stats().generated_tokens - begun) / (time.perf_counter() - at)

    def _request(self, adapter: str) -> Request:
        self._asked += 1
        source = random.Random(self._asked % STREAMS)
        vocabulary = self._engine.checkpoint.config.vocab_size
        prompt = tuple(source.randrange(vocabulary) for _ in range(_PROMPT))
        sampling = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        return Request(str(self._asked), prompt, sampling, adapter=adapter)
