"""One model over two processes of one core each, beside one process with two threads, on the same weights; a model of
experts with half of these in each process; in two stages beside one process with one thread, and with one of them
computed by a service as on another host; and how soon an engine says that one of its processes has died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from penstock.bench.e2e import processes
from penstock.bench.engine.shapes import MIXED, LlamaShape, checkpoint
from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, figure, interleave
from penstock.cli.child import ChildSpec, running
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineClosed
from penstock.engine.request import Request, SamplingParams
from penstock.models import NAMES, embedded
from penstock.worker.stages.speaking import StagesAway

SHAPE = LlamaShape(
    name="400m", layers=16, hidden=1280, heads=20, kv_heads=4, head_dim=64, intermediate=4096, vocab=48000
)
_GOAL = 0.85
_DEATH_GOAL_S = 1.0
_START_S = 60.0
_FOLLOWER = "penstock.engine.forward.following"
_SPEEDUP_GOAL = 1.6
_SUBJECTS = {"threads2": (2, 1, 1), "tp2": (1, 2, 1), "thread1": (1, 1, 1), "pp2": (1, 1, 2)}
"""Threads of each process, and processes: that compute each layer, and stages."""
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: tokens/s of streams from the step that gave the last its first token on; or of a prompt."""

    id: str
    streams: int
    tokens: int
    """That each stream generates; 0: its prompt is measured."""
    prompt: int = 64


LOADS = (Load("tp2_vs_threads2", 1, 48), Load("tp2_vs_threads2_8", 8, 24), Load("tp2_vs_threads2_prompt", 1, 0, 1024))
EXPERTS = (Load("ep2_vs_threads2", 1, 48), Load("ep2_vs_threads2_8", 8, 24))
STAGED = (Load("pp2_speedup_16", 16, 24), Load("pp2_speedup_prompt", 1, 0, 1024))
HOSTED = (Load("pp2_hosted_1", 1, 48), Load("pp2_hosted_16", 16, 24), Load("pp2_hosted_prompt", 1, 0, 1024))
_WHOLE = {
    **dict.fromkeys((*LOADS, *EXPERTS), "one process with two threads"),
    **dict.fromkeys(STAGED, "one process with one thread"),
    **dict.fromkeys(HOSTED, "both stages on one host"),
}


async def rank_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    model, mixed = (checkpoint(shape, Places.default().models) for shape in (SHAPE, MIXED))
    plain = EngineConfig(model=model, kv_pool_tokens=8192, lookup_tokens=0, draft_tokens=0)
    rounds = 2 if quick else 7
    found: list[Figure] = []
    async with AsyncExitStack() as stack:
        engines = {}
        for name, (threads, ranks, stages) in _SUBJECTS.items():
            config = replace(plain, threads=threads, tp=ranks, pp=stages)
            engines[name] = await stack.enter_async_context(Engine.open(config))
        away = StagesAway([await stack.enter_async_context(_stage(model))], None)
        engines["hosted"] = await stack.enter_async_context(
            Engine.open(replace(plain, threads=1, pp=2), load=away.load)
        )
        for load, split, whole in [
            *((load, "tp2", "threads2") for load in LOADS),
            *((load, "pp2", "thread1") for load in STAGED),
            *((load, "hosted", "pp2") for load in HOSTED),
        ]:
            found += await _beside(load, engines[split], engines[whole], rounds)
    one = replace(plain, model=mixed, threads=2)
    async with Engine.open(one) as whole_engine, Engine.open(replace(one, threads=1, tp=2, ep=2)) as split_engine:
        for load in EXPERTS:
            found += await _beside(load, split_engine, whole_engine, rounds)
    deaths = [await death_s() for _ in range(rounds)]
    against = "from kill -9 of a rank until its engine has failed the stream and says that it is lost"
    return [*found, figure("rank_death_s", deaths, "s", against, _DEATH_GOAL_S, lower_is_better=True)]


async def _beside(load: Load, split: Engine, whole: Engine, rounds: int) -> list[Figure]:
    """Both in turns."""
    measures = {"split": partial(rate, split, load), "whole": partial(rate, whole, load)}
    rates = await interleave(measures, rounds)
    return figures_of(load, rates["split"], rates["whole"])


def figures_of(load: Load, split: Sequence[float], whole: Sequence[float]) -> list[Figure]:
    """The ratio in each round, and both rates. The goals are of one stream over ranks, and of many over stages."""
    ratios = [ours / theirs for ours, theirs in zip(split, whole, strict=True)]
    goal = {LOADS[0]: _GOAL, EXPERTS[0]: _GOAL, STAGED[0]: _SPEEDUP_GOAL}.get(load)
    against = _WHOLE[load]
    return [
        figure(load.id, ratios, "x", against, goal),
        figure(f"{load.id}_split_tokens_per_s", split, "tokens/s", "two processes of one core each"),
        figure(f"{load.id}_whole_tokens_per_s", whole, "tokens/s", against),
    ]


async def rate(engine: Engine, load: Load, round: int) -> float:
    """Tokens/s."""
    if not load.tokens:
        begin = time.perf_counter()
        async for _ in _stream(engine, load.prompt, 1, round):
            pass
        return load.prompt / (time.perf_counter() - begin)
    seen: list[list[float]] = [[] for _ in range(load.streams)]

    async def read(number: int) -> None:
        async for tokens in _stream(engine, load.prompt, load.tokens, number):
            seen[number] += [time.perf_counter()] * tokens

    await asyncio.gather(*(read(number) for number in range(load.streams)))
    begin, end = max(times[0] for times in seen), min(times[-1] for times in seen)
    return sum(begin < moment <= end for times in seen for moment in times) / (end - begin)


@asynccontextmanager
async def _stage(model: Path) -> AsyncIterator[str]:
    """The address of a stage's host: another process, over the loopback device."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    spec = ChildSpec("stage", (sys.executable, "-m", "penstock.stage", "--model", str(model)))
    async with running(spec, lambda values: ready.set_result(str(values["address"])), lambda *_: None):
        async with asyncio.timeout(_START_S):
            address = await ready
        yield address


async def death_s() -> float:
    """Seconds from the death of a rank until its engine says so."""
    config = EngineConfig(model=embedded(NAMES[0]), lookup_tokens=0, draft_tokens=0, threads=1, tp=2)
    async with Engine.open(config) as engine, aclosing(_stream(engine, 64, 900, 0)) as stream:
        await anext(stream)
        (rank,) = processes.named(processes.tree(os.getpid()), _FOLLOWER)
        began = time.perf_counter()
        os.kill(rank, signal.SIGKILL)
        with suppress(EngineClosed):
            async for _ in stream:
                pass
        await engine.lost.wait()
        return time.perf_counter() - began


async def _stream(engine: Engine, prompt: int, tokens: int, seed: int) -> AsyncGenerator[int, None]:
    """How many tokens come at a time."""
    vocabulary = engine.checkpoint.config.vocab_size
    ids = tuple((seed * 7919 + number * 104729) % vocabulary for number in range(prompt))
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with aclosing(engine.generate(Request(f"bench-{next(_NUMBERS)}", ids, sampling))) as updates:
        async for update in updates:
            yield len(update.tokens)
