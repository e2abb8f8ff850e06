"""The embedded model, with and without the C++ steps.

All engines are open at once and take turns, with as many threads as the machine has cores. Greedy, without drafting;
a sample is one stream, then eight, of short prompts. The limit beside them is reading the weights: what one pass over
as many bytes takes, by torch's sum, in the same round.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import torch

from penstock.bench.harness import Figure, figure, interleave
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.models import NAMES, embedded

_SUBJECTS = {
    "torch": ("float32", False),
    "float32": ("float32", True),
    "bfloat16": ("bfloat16", True),
    "int8": ("int8", True),
    "int4": ("int4", True),
}
"""Weights, and whether the C++ steps are used."""
_PROMPT_TOKENS = 64
_STREAMS = 8


@dataclass(frozen=True, slots=True)
class EmbeddedSample:
    """Tokens per second."""

    alone: float
    together: float
    limit: float
    """If a token took as long as one pass over the float32 weights."""


async def measure(quick: bool) -> list[Figure]:
    """All figures of the embedded model."""
    tokens, rounds = (64, 3) if quick else (256, 9)
    async with AsyncExitStack() as stack:
        subjects = {}
        for name, (dtype, kernels) in _SUBJECTS.items():
            config = EngineConfig(
                embedded(NAMES[0]), dtype=dtype, kernels=kernels, threads=os.cpu_count() or 0, draft_tokens=0
            )
            subjects[name] = _Subject(await stack.enter_async_context(Engine.open(config)), tokens).measure
        samples = await interleave(subjects, rounds)
    return _figures(samples)


def _figures(samples: dict[str, list[EmbeddedSample]]) -> list[Figure]:
    plain, best, stored = samples["torch"], samples["float32"], samples["bfloat16"]
    rates = [
        figure(f"embedded_{name}_b{count}_tokens_per_s", [getattr(one, part) for one in found], "tokens/s", "for scale")
        for count, part in ((1, "alone"), (_STREAMS, "together"))
        for name, found in samples.items()
    ]
    pairs = list(zip(best, plain, strict=True))
    passes = "one pass over the weights by torch's sum"
    same = "same engine on torch"
    return [
        figure(
            "embedded_tokens_per_s",
            [one.alone for one in stored],
            "tokens/s",
            "bfloat16, as the weights are stored, one stream",
            1500.0,
        ),
        figure(
            "embedded_b1_vs_torch", [one.alone / other.alone for one, other in pairs], "ratio", "same engine on torch"
        ),
        figure("embedded_b8_vs_torch", [a.together / b.together for a, b in pairs], "ratio", same),
        figure("embedded_b1_vs_weights_read", [one.alone / one.limit for one in best], "ratio", passes),
        *rates,
    ]


class _Subject:
    """An engine that is measured."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens
        weights = sum(file.stat().st_size for file in engine.checkpoint.weight_files) * 2  # from bfloat16 to float32
        self._weights = torch.ones(weights // 4)

    async def measure(self, round: int) -> EmbeddedSample:
        """Measures one stream, then eight, then the limit."""
        begin = time.perf_counter()
        await self._stream(f"{round}")
        alone = self._tokens / (time.perf_counter() - begin)
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(_STREAMS):
                tasks.create_task(self._stream(f"{round}/{number}"))
        together = _STREAMS * self._tokens / (time.perf_counter() - begin)
        return EmbeddedSample(alone, together, 1 / _seconds_of_a_pass(self._weights))

    async def _stream(self, name: str) -> None:
        source = random.Random(name)
        prompt = tuple(source.randrange(300, 4000) for _ in range(_PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        async with aclosing(self._engine.generate(Request(name, prompt, sampling))) as updates:
            async for _ in updates:
                pass


def _seconds_of_a_pass(weights: torch.Tensor, passes: int = 5) -> float:
    seconds = []
    for _ in range(passes):
        begin = time.perf_counter()
        weights.sum()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
