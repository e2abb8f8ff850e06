"""`penstock bench masked`: what a grammar costs per token, beside the same engine without one.

Both sides generate greedily, from the same prompts, with the same number of streams. The guided texts are JSON: an
array of small objects, long enough that no text ends. Time counts from a stream's first token on, so that neither
prompts nor compiling count. The engine that gives the goal's figures takes no drafts; another one takes those that
grammars force.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from penstock.bench.harness import BenchReport, Figure, figure, interleave
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.models import embedded
from penstock.testing import schemas

_MODEL = "penstock-mini"
_STREAMS = (1, 16)
_PROMPT_TOKENS = 64
_MOST = 1.10
"""The goal: a masked token costs at most a tenth more than a plain one."""
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
            "size": {"type": "integer", "minimum": 0, "maximum": 99999},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["name", "tags", "size", "note"],
        "additionalProperties": False,
    },
    "minItems": 400,
}


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """One round of one subject."""

    seconds: dict[int, float]
    """From one token of a stream to its next, on average, by the number of streams."""


async def measure(quick: bool) -> BenchReport:
    """Runs the bench."""
    return BenchReport("masked", await figures(quick))


async def figures(quick: bool) -> list[Figure]:
    """The bench's figures, for a bench that shows them beside others."""
    tokens, rounds = (96, 5) if quick else (256, 15)
    model = embedded(_MODEL)
    async with (
        Engine.open(EngineConfig(model=model, draft_tokens=0)) as plain,
        Engine.open(EngineConfig(model=model, lookup_tokens=0)) as drafting,
    ):
        grammar = schemas.grammar(_SCHEMA)
        subjects = {
            "plain": partial(_round, plain, "", tokens),
            "masked": partial(_round, plain, grammar, tokens),
            "forced": partial(_round, drafting, grammar, tokens),
        }
        samples = await interleave(subjects, rounds)
    return [
        *_ratios("masked_vs_plain", samples["masked"], samples["plain"], "the same engine without a grammar", _MOST),
        *_ratios("forced_vs_plain", samples["forced"], samples["plain"], "the same, without a grammar and drafts"),
        *(
            figure(f"plain_token_us_{count}", [one.seconds[count] * 1e6 for one in samples["plain"]], "us", "for scale")
            for count in _STREAMS
        ),
    ]


def _ratios(
    name: str, own: Sequence[TokenTimes], other: Sequence[TokenTimes], against: str, goal: float | None = None
) -> list[Figure]:
    pairs = list(zip(own, other, strict=True))
    return [
        figure(
            f"{name}_{count}",
            [mine.seconds[count] / theirs.seconds[count] for mine, theirs in pairs],
            "ratio",
            against,
            goal,
            lower_is_better=True,
        )
        for count in _STREAMS
    ]


async def _round(engine: Engine, grammar: str, tokens: int, round: int) -> TokenTimes:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=not grammar, grammar=grammar)
    vocab = engine.checkpoint.config.vocab_size
    return TokenTimes({count: await _together(engine, _requests(round, count, vocab, sampling)) for count in _STREAMS})


def _requests(round: int, count: int, vocab: int, sampling: SamplingParams) -> list[Request]:
    """The same for every subject of a round."""
    source = random.Random(f"{round}/{count}")
    prompts = [tuple(source.randrange(300, vocab) for _ in range(_PROMPT_TOKENS)) for _ in range(count)]
    return [Request(f"{round}/{count}/{number}", prompt, sampling) for number, prompt in enumerate(prompts)]


async def _together(engine: Engine, requests: Sequence[Request]) -> float:
    """Seconds from one token of a stream to its next, when all run at once."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_stream(engine, request)) for request in requests]
    return sum(task.result() for task in running) / sum(one.sampling.max_tokens - 1 for one in requests)


async def _stream(engine: Engine, request: Request) -> float:
    """Seconds from the first token to the last."""
    first, count = 0.0, 0
    async with aclosing(engine.generate(request)) as updates:
        async for update in updates:
            first = first or time.perf_counter()
            count += len(update.tokens)
    assert count == request.sampling.max_tokens, "a text ended before it was long enough"
    return time.perf_counter() - first
