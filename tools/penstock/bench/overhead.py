"""`penstock bench overhead`: what the mesh costs beside the same engine driven in one process.

Both sides generate the same number of tokens from prompts of the same length, greedily, without drafting; every
prompt is new, so nothing is cached. The mesh is `penstock up` with its processes, spoken to over HTTP; its client
shares the machine's cores. The bare engine is the same code in this process, with as many threads as one worker of
the mesh has.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx2
import msgspec

from penstock.bench.harness import BenchReport, Figure, figure, interleave
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.models import embedded
from penstock.runtime.cores import host_shares

_PROMPT_TOKENS = 512
_MODEL = "penstock-mini"
_WORKERS = 2
"""Workers of the mesh: one prefill, one decode."""


@dataclass(frozen=True, slots=True)
class MeshSample:
    """One round of one subject."""

    ttft_s: float
    """Seconds to the first token of one stream."""
    alone: float
    """Tokens/s of one stream after its first token."""
    together: float
    """Tokens/s of eight streams, all of them, from the first byte sent to the last received."""


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When the tokens of one stream came, in seconds since it was asked for."""

    first_s: float
    last_s: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens/s after the first."""
        return (self.tokens - 1) / (self.last_s - self.first_s)


class Prompts:
    """New random prompts of one length."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def of(self, subject: str, round: int, count: int) -> list[list[int]]:
        """`count` prompts that are new to both sides."""
        source = random.Random(f"{subject}/{round}/{count}")
        return [[source.randrange(300, self._vocab) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]


async def measure(quick: bool) -> BenchReport:
    """Runs the bench."""
    tokens, rounds = (64, 3) if quick else (192, 7)
    config = EngineConfig(model=embedded(_MODEL), threads=_threads(), draft_tokens=0)
    async with Engine.open(config) as engine, _mesh() as client:
        prompts = Prompts(engine.checkpoint.config.vocab_size)
        bare, mesh = _Bare(engine, prompts, tokens), _Mesh(client, prompts, tokens)
        samples = await interleave({"bare": bare.measure, "mesh": mesh.measure}, rounds)
    return BenchReport("overhead", _figures(samples["bare"], samples["mesh"]))


def _threads() -> int:
    """Threads that a worker of the mesh would have."""
    weights = sum(file.stat().st_size for file in inspect(embedded(_MODEL)).weight_files)
    return host_shares(_WORKERS, weights)[0].threads


def _figures(bare: Sequence[MeshSample], mesh: Sequence[MeshSample]) -> list[Figure]:
    pairs = list(zip(bare, mesh, strict=True))
    against = "same engine, one process"
    return [
        figure("tokens_per_s_ratio_1", [m.alone / b.alone for b, m in pairs], "ratio", against, 0.8),
        figure("tokens_per_s_ratio_8", [m.together / b.together for b, m in pairs], "ratio", against, 0.8),
        figure(
            "ttft_added_ms",
            [(m.ttft_s - b.ttft_s) * 1e3 for b, m in pairs],
            "ms",
            against,
            10.0,
            lower_is_better=True,
        ),
        figure("bare_tokens_per_s_1", [b.alone for b in bare], "tokens/s", "for scale"),
        figure("mesh_tokens_per_s_1", [m.alone for m in mesh], "tokens/s", "for scale"),
        figure("bare_tokens_per_s_8", [b.together for b in bare], "tokens/s", "for scale"),
        figure("mesh_tokens_per_s_8", [m.together for m in mesh], "tokens/s", "for scale"),
        figure("bare_ttft_ms", [b.ttft_s * 1e3 for b in bare], "ms", "for scale"),
    ]


class _Subject:
    """A way to generate; measured alone and with eight streams."""

    name = ""

    def __init__(self, prompts: Prompts, tokens: int) -> None:
        self._prompts = prompts
        self._tokens = tokens

    async def measure(self, round: int) -> MeshSample:
        """Runs one stream, then eight."""
        alone = await self._stream(self._prompts.of(self.name, round, 1)[0])
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for prompt in self._prompts.of(self.name, round, 8):
                tasks.create_task(self._stream(prompt))
        together = 8 * self._tokens / (time.perf_counter() - started)
        return MeshSample(alone.first_s, alone.rate, together)

    async def _stream(self, prompt: list[int]) -> StreamTimes:
        raise AssertionError("every subject has its own")


class _Bare(_Subject):
    name = "bare"

    def __init__(self, engine: Engine, prompts: Prompts, tokens: int) -> None:
        super().__init__(prompts, tokens)
        self._engine = engine

    async def _stream(self, prompt: list[int]) -> StreamTimes:
        sampling = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        request = Request(id=f"bench-{random.getrandbits(64):x}", prompt=tuple(prompt), sampling=sampling)
        started, first = time.perf_counter(), 0.0
        async with aclosing(self._engine.generate(request)) as updates:
            async for update in updates:
                if update.tokens and not first:
                    first = time.perf_counter() - started
        return StreamTimes(first, time.perf_counter() - started, self._tokens)


class _Mesh(_Subject):
    name = "mesh"

    def __init__(self, client: httpx2.AsyncClient, prompts: Prompts, tokens: int) -> None:
        super().__init__(prompts, tokens)
        self._client = client

    async def _stream(self, prompt: list[int]) -> StreamTimes:
        body = {
            "model": _MODEL,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        started, first = time.perf_counter(), 0.0
        async with self._client.stream("POST", "/v1/completions", content=msgspec.json.encode(body)) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_raw():
                if not first and b"data:" in chunk:
                    first = time.perf_counter() - started
        return StreamTimes(first, time.perf_counter() - started, self._tokens)


@asynccontextmanager
async def _mesh() -> AsyncIterator[httpx2.AsyncClient]:
    """`penstock up` on a free port, without drafting."""
    command = [sys.executable, "-m", "penstock.cli", "up", "--port", "0", "--draft", "none"]
    environment = {**os.environ, "PENSTOCK_DECODE_DRAFT_TOKENS": "0"}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        async with httpx2.AsyncClient(base_url=await _ready(process), timeout=120) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def _ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        found = re.search(rb"ready (http://\S+)", line)
        if found:
            return found[1].decode()
    raise RuntimeError("penstock up ended before it was ready")
