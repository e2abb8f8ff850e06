"""A batch beside live traffic: what people notice of it, and how much it makes of what they leave.

A round has three phases, one behind the other in one mesh: live traffic alone, the same traffic beside a batch of a
thousand lines, and the rest of the batch alone. Requests of the traffic come when they come, the same in each phase,
whether others have their answers or not. What traffic leaves idle is the processor time that it does not take of what
the batch alone takes; how much of that the batch uses is its pace beside the traffic, over its pace alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import httpx2
import numpy as np
from openai import AsyncOpenAI, ConflictError

from penstock.bench.e2e import processes
from penstock.bench.e2e.prompts import PromptSource, everything
from penstock.bench.e2e.running import Server, free_port, serving
from penstock.bench.e2e.servers import MESH, mesh
from penstock.bench.harness import BenchReport, Figure, figure
from penstock.checkpoint import inspect
from penstock.load.asking import TimedAnswer, TokenClient
from penstock.models import embedded

_MODEL = "penstock-mini"
_ENDPOINT: Final = "/v1/completions"
_LINES, _LINE_PROMPT, _LINE_OUTPUT = 1000, 96, 128
_LAST = 80
"""With so few left the batch is not the same any more."""
_LOOK_S = 0.1
_BUSY = 0.5
"""Requests that run at one time, in the mean, by what one takes alone."""
_WARM_S = 2.0
"""From the begin of a batch until it is looked at."""
_ENOUGH = 0.8
_WORSE = 1.1
"""The goals."""
_ANSWERED = re.compile(r'^penstock_batch_lines_total\{outcome="answered"\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTraffic:
    """Requests whose distances are random, as those of people who know nothing of each other."""

    per_s: float
    seconds: float
    prompt: int = 192
    output: int = 48

    async def run(self, client: TokenClient, source: PromptSource, times: str) -> Sequence[TimedAnswer]:
        """All answers; requests come at the same times for the same `times`."""
        chance, at, starts = random.Random(times), 0.0, []
        while (at := at + chance.expovariate(self.per_s)) < self.seconds:
            starts.append(at)
        begin = asyncio.get_running_loop().time()

        async def one(number: int, start: float) -> TimedAnswer:
            prompt = source.tokens(self.prompt)
            await asyncio.sleep(max(0.0, begin + start - asyncio.get_running_loop().time()))
            return await client.ask(prompt, self.output, f"{source.name}-{number}")

        answers = await everything(one(number, start) for number, start in enumerate(starts))
        await asyncio.sleep(max(0.0, begin + self.seconds - asyncio.get_running_loop().time()))
        return answers


def itl_p90(answers: Sequence[TimedAnswer]) -> float:
    """Of all gaps between tokens, in seconds."""
    return float(np.percentile([gap for answer in answers for gap in answer.gaps], 90))


def ttft_p90(answers: Sequence[TimedAnswer]) -> float:
    """In seconds."""
    return float(np.percentile([answer.time_to_first_token for answer in answers], 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRound:
    """What one round has shown."""

    idle: float
    """Share of the mesh's processor time that live traffic leaves."""
    used: float
    """Share of that which the batch has used."""
    itl: float
    """How many times as long as without the batch, at the 90th percentile."""
    ttft: float
    alone_tokens_per_s: float
    """Of the batch."""
    beside_tokens_per_s: float
    live_itl_ms: float
    live_ttft_ms: float


async def measure(quick: bool) -> BenchReport:
    """Runs the rounds; the first warms up."""
    rounds, seconds = (1, 15.0) if quick else (5, 20.0)
    with tempfile.TemporaryDirectory(prefix="penstock-batch-") as directory:
        port = free_port()
        async with serving(mesh(MESH, embedded(_MODEL), port, "--batch-store", directory), port) as server:
            vocab = inspect(embedded(_MODEL)).config.vocab_size
            per_s = _BUSY / await _one_takes(server, vocab)
            async with (
                AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
            ):
                bench = _Bench(server, client, http, vocab, LiveTraffic(per_s=per_s, seconds=seconds))
                found = [await bench.round(number) for number in range(rounds + 1)][1:]
    return BenchReport("batch", batch_figures(found))


async def _one_takes(server: Server, vocab: int) -> float:
    """Seconds of a live request alone."""
    shape, source = LiveTraffic(per_s=1, seconds=1), PromptSource(vocab, "calibration")
    answers = [await server.client.ask(source.tokens(shape.prompt), shape.output, f"calibration-{n}") for n in range(6)]
    return statistics.median(answer.request_latency for answer in answers[1:])


class _Bench:
    def __init__(
        self, server: Server, client: AsyncOpenAI, http: httpx2.AsyncClient, vocab: int, traffic: LiveTraffic
    ) -> None:
        self._server = server
        self._client = client
        self._http = http
        self._vocab = vocab
        self._traffic = traffic

    async def round(self, number: int) -> BatchRound:
        """Runs the phases."""
        alone, alone_cpu = await self._live(f"alone {number}", f"{number}")
        id = await self._begin(number)
        await asyncio.sleep(_WARM_S)
        before, began = await self._answered(), time.perf_counter()
        beside, _ = await self._live(f"beside {number}", f"{number}")
        beside_rate = (await self._answered() - before) / (time.perf_counter() - began)
        alone_rate, batch_cpu = await self._rest(id)
        idle = 1 - alone_cpu / batch_cpu
        return BatchRound(
            idle=idle,
            used=beside_rate / (alone_rate * idle),
            itl=itl_p90(beside) / itl_p90(alone),
            ttft=ttft_p90(beside) / ttft_p90(alone),
            alone_tokens_per_s=alone_rate * _LINE_OUTPUT,
            beside_tokens_per_s=beside_rate * _LINE_OUTPUT,
            live_itl_ms=itl_p90(alone) * 1e3,
            live_ttft_ms=ttft_p90(alone) * 1e3,
        )

    async def _live(self, name: str, times: str) -> tuple[Sequence[TimedAnswer], float]:
        """The answers, and the processors' seconds per second that the mesh took meanwhile."""
        pids, began = self._server.pids, time.perf_counter()
        before = processes.cpu_s(pids)
        answers = await self._traffic.run(self._server.client, PromptSource(self._vocab, name), times)
        return answers, (processes.cpu_s(pids) - before) / (time.perf_counter() - began)

    async def _begin(self, number: int) -> str:
        """Begins a batch; its id."""
        source = PromptSource(self._vocab, f"lines {number}")
        lines = (
            {
                "custom_id": f"{line}",
                "method": "POST",
                "url": _ENDPOINT,
                "body": {
                    "model": _MODEL,
                    "prompt": source.tokens(_LINE_PROMPT),
                    "max_tokens": _LINE_OUTPUT,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
            for line in range(_LINES)
        )
        data = "\n".join(map(json.dumps, lines)).encode()
        file = await self._client.files.create(file=("lines.jsonl", data), purpose="batch")
        batch = await self._client.batches.create(input_file_id=file.id, endpoint=_ENDPOINT, completion_window="24h")
        return batch.id

    async def _answered(self) -> float:
        """Lines that have an answer, of all batches."""
        found = _ANSWERED.search((await self._http.get("/metrics")).text)
        return float(found[1]) if found else 0.0

    async def _rest(self, id: str) -> tuple[float, float]:
        """Lines per second of the batch alone, and the processors' seconds per second. Ends the batch."""
        counts = (await self._client.batches.retrieve(id)).request_counts
        assert counts is not None
        left = counts.total - counts.completed - _LAST
        if left < _LAST:
            raise RuntimeError(f"only {left + _LAST} of {counts.total} lines were left to measure the batch alone")
        pids, before, began = self._server.pids, await self._answered(), time.perf_counter()
        cpu = processes.cpu_s(pids)
        while True:
            done, took = await self._answered() - before, time.perf_counter() - began
            if done >= left or took >= self._traffic.seconds:
                break
            await asyncio.sleep(_LOOK_S)
        rates = done / took, (processes.cpu_s(pids) - cpu) / took
        await self._end(id)
        return rates

    async def _end(self, id: str) -> None:
        with suppress(ConflictError):  # it is over
            await self._client.batches.cancel(id)
        while True:
            if (await self._client.batches.retrieve(id)).status in ("completed", "cancelled"):
                return
            await asyncio.sleep(_LOOK_S)


def batch_figures(found: Sequence[BatchRound]) -> list[Figure]:
    """Of all rounds."""
    alone, beside = "the same traffic alone, p90", "the batch alone, by what traffic leaves"
    lines = f"{_LINES} lines of {_LINE_PROMPT} + {_LINE_OUTPUT} tokens"
    return [
        figure("batch_idle_share_used", [one.used for one in found], "ratio", beside, _ENOUGH),
        figure("batch_live_itl_p90_ratio", [one.itl for one in found], "ratio", alone, _WORSE, lower_is_better=True),
        figure("batch_live_ttft_p90_ratio", [one.ttft for one in found], "ratio", alone, _WORSE, lower_is_better=True),
        figure("batch_idle_share", [one.idle for one in found], "ratio", "for scale"),
        figure("batch_tokens_per_s_alone", [one.alone_tokens_per_s for one in found], "tokens/s", lines),
        figure("batch_tokens_per_s_beside", [one.beside_tokens_per_s for one in found], "tokens/s", lines),
        figure("batch_live_itl_p90_ms", [one.live_itl_ms for one in found], "ms", "for scale"),
        figure("batch_live_ttft_p90_ms", [one.live_ttft_ms for one in found], "ms", "for scale"),
    ]
