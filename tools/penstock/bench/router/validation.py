"""The simulator beside a real mesh: the same requests, and how far its TTFT is off.

The mesh is one worker that does both, as `penstock up` starts it, with random weights. Its rates are measured from
outside first: TTFT of lone prompts of several lengths, and time between tokens of several streams and contexts.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.bench.e2e.model import served
from penstock.bench.e2e.prompts import PromptSource, everything
from penstock.bench.e2e.subjects import Sources
from penstock.bench.engine.process import Failed
from penstock.bench.engine.shapes import SMALL
from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, figure, missing
from penstock.cli.mesh import MeshOptions
from penstock.load.asking import TimedAnswer, TokenClient
from penstock.load.wording import FIRST_ID
from penstock.router.workers import StepCost
from penstock.simulator.rates import UNITS, rates
from penstock.simulator.simulation import SimulatedMesh, Simulation
from penstock.simulator.workers import WorkerModel
from penstock.traces.reading import RecordedAsk, Trace, load
from penstock.traces.shaping import crowded, half, new_tokens, session_seconds, shrunk

_MESH = "mesh_aggregated"
_SHRINK = 4
"""Prompts are so many times shorter than recorded: a laptop serves them."""
_REQUESTS = (120, 40)
"""Of a round; of a quick one."""
_LOAD = 0.5
"""The part of the time that prompts and answers would take one after the other, if no prompt is computed twice."""
_LENGTHS = (16, 128, 512, 1024, 3072)
_TURNS = ((2048, 640), (8192, 640))
"""Tokens that a session has sent before, and those that its next turn brings."""
_SHAPES = ((1, 64), (4, 64), (8, 64), (1, 2048), (1, 8192), (3, 4096), (8, 2048))
"""Streams and the tokens of their prompts."""
_TTFT_P50, _TTFT_P90 = 50.0, 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a worker does, measured from outside."""

    overhead_s: float
    """Of a request, however short its prompt."""
    prefill_rate: float
    """Tokens/s, with no context before them."""
    prefill_context_s: float
    """What each token of the context before it adds."""
    step: StepCost
    fetch_rate: float
    """Bytes/s from the store."""

    def mean(self, other: Calibration) -> Calibration:
        """Of two: the machine is another one now and then."""
        one, two = self.step, other.step
        return Calibration(
            overhead_s=(self.overhead_s + other.overhead_s) / 2,
            prefill_rate=(self.prefill_rate + other.prefill_rate) / 2,
            prefill_context_s=(self.prefill_context_s + other.prefill_context_s) / 2,
            step=StepCost(
                (one.base_s + two.base_s) / 2, (one.sequence_s + two.sequence_s) / 2, (one.token_s + two.token_s) / 2
            ),
            fetch_rate=(self.fetch_rate + other.fetch_rate) / 2,
        )

    @property
    def model(self) -> WorkerModel:
        """Of a worker that does both, with the settings of `penstock up`."""
        settings = MeshOptions().engine
        return WorkerModel(
            prefill_rate=self.prefill_rate,
            prefill_context_s=self.prefill_context_s,
            step=self.step,
            max_running=settings.max_running,
            chunk_tokens=settings.max_batch_tokens,
            kv_tokens=settings.kv_pool_tokens,
            fetch_rate=self.fetch_rate,
        )


async def validation_figures(trace: Path, quick: bool) -> list[Figure]:
    """`simulator_ttft_error`: how far p50 and p90 of the TTFT are off, the worse of both, in each round. And the
    rates of the worker, as they were simulated."""
    places = Places.default()
    sources = Sources(SMALL, await asyncio.to_thread(served, SMALL, places.models), places)
    errors: dict[float, list[float]] = {_TTFT_P50: [], _TTFT_P90: []}
    models: list[WorkerModel] = []
    try:
        async with sources.open(_MESH) as server:
            client = server.client
            for round in range(1 if quick else 3):
                found = await calibrated(client, PromptSource(SMALL.vocab, f"calibration/{round}"))
                asks = _workload(trace, found, requests=_REQUESTS[quick])
                print(f"round {round + 1}: {found}", file=sys.stderr, flush=True)
                measured = [one.time_to_first_token for one in await _play(asks, client, f"{round}")]
                after = await calibrated(client, PromptSource(SMALL.vocab, f"calibration/{round}/after"))
                print(f"after it: {after}", file=sys.stderr, flush=True)
                meanwhile = found.mean(after)
                models.append(meanwhile.model)
                predicted = simulated(asks, meanwhile)
                for percent, off in errors.items():
                    real, model = (float(np.percentile(times, percent)) for times in (measured, predicted))
                    print(
                        f"p{percent:.0f}: measured {real:.3f} s, simulated {model:.3f} s", file=sys.stderr, flush=True
                    )
                    off.append(abs(model / real - 1))
    except Failed as error:
        return [missing("simulator_ttft_error", "ratio", str(error), 0.2)]
    worse = [max(pair) for pair in zip(*errors.values(), strict=True)]
    return [
        figure("simulator_ttft_error", worse, "ratio", "a mesh under the same requests", 0.2, lower_is_better=True),
        *(figure(f"simulator_ttft_error_p{percent:.0f}", off, "ratio", "likewise") for percent, off in errors.items()),
        *rate_figures(models),
    ]


def rate_figures(models: Sequence[WorkerModel]) -> list[Figure]:
    """What `penstock simulate --rates` reads: the rates of one worker, from a model of it in each round."""
    found = [rates(model) for model in models]
    return [figure(id, [one[id] for one in found], unit, "for scale") for id, unit in UNITS.items()]


async def calibrated(client: TokenClient, source: PromptSource) -> Calibration:
    """Measures a server that has nothing else to do."""
    first = [(length, (await client.ask(source.tokens(length), 1, "")).time_to_first_token) for length in _LENGTHS * 3]
    lengths = sorted(set(_LENGTHS))
    medians = [statistics.median(seconds for length, seconds in first if length == one) for one in lengths]
    shapes = [(1.0, length, length * length / 2) for length in lengths]
    for before, new in _TURNS:
        begun = source.tokens(before)
        await client.ask(begun, 1, "")
        turns = [(await client.ask(begun + source.tokens(new), 1, "")).time_to_first_token for _ in range(3)]
        medians.append(statistics.median(turns))
        shapes.append((1.0, new, new * (before + new / 2)))
    overhead_s, token_s, context_s = _fitted(shapes, medians)
    rows, steps = [], []
    for streams, context in _SHAPES:
        prompts = [source.tokens(context) for _ in range(streams)]
        for prompt in prompts:  # so that all streams begin at once, and none has its steps beside another's prompt
            await client.ask(prompt, 1, "")
        answers = await everything(client.ask(prompt, 64, "") for prompt in prompts)
        rows.append((1.0, streams, streams * (context + 32)))
        steps.append(statistics.median(gap for answer in answers for gap in answer.gaps[16:]))
    step = StepCost(*_fitted(rows, steps))
    return Calibration(
        overhead_s=overhead_s,
        prefill_rate=1 / token_s,
        prefill_context_s=context_s,
        step=step,
        fetch_rate=await _fetch_rate(client, source, overhead_s),
    )


async def _fetch_rate(client: TokenClient, source: PromptSource, overhead_s: float) -> float:
    """Bytes/s of a prompt that only the store has: others have taken its place in the worker's pages. Raises Failed if
    it was computed again."""
    length = _LENGTHS[-1]
    mine = source.tokens(length)
    for _ in range(2):  # what was used again stays in the store while others come
        await client.ask(mine, 1, "")
    for _ in range(MeshOptions().engine.kv_pool_tokens // length + 1):
        await client.ask(source.tokens(length), 1, "")
    answer = await client.ask(mine, 1, "")
    if answer.cached_tokens < length / 2:
        raise Failed(f"the store has lost a prompt of {length} tokens, so nobody knows how fast it is")
    took_s = answer.time_to_first_token - overhead_s
    return length * SMALL.kv_bytes / max(took_s, 1e-3)


def _fitted(rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none below 0, that are off by as little as possible in per cent."""
    shapes = np.array(rows) / np.array(seconds)[:, None]
    best, least = np.zeros(3), np.inf
    for used in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(shapes[:, used], np.ones(len(rows)), rcond=None)[0]
        off = float(np.sum((shapes @ found - 1) ** 2))
        if off < least and (found >= 0).all():
            best, least = found, off
    return [float(one) for one in best]


def simulated(trace: Trace, found: Calibration) -> list[float]:
    """TTFT of the same requests before a modelled worker, in seconds, as their clients would see it."""
    blocks = MeshOptions().kv_host_bytes // (SMALL.kv_bytes * trace.block_tokens)
    mesh = SimulatedMesh(both=1, token_bytes=SMALL.kv_bytes, store_blocks=blocks, model=found.model)
    return [one.ttft_s + found.overhead_s for one in Simulation(mesh, trace).run().requests]


def _workload(path: Path, found: Calibration, requests: int) -> Trace:
    trace = shrunk(half(load(path), second=True), _SHRINK)
    news = zip(trace.asks, new_tokens(trace), strict=True)
    prompts_s = sum(found.model.prefill_s(ask.tokens - new, ask.tokens) for ask, new in news)
    answers_s = sum(ask.output * found.step.seconds(1, ask.tokens) for ask in trace.asks)
    busy_s = (prompts_s + answers_s) / _LOAD
    return crowded(trace, session_seconds(trace) / busy_s, requests)


async def _play(trace: Trace, client: TokenClient, round: str) -> list[TimedAnswer]:
    """Sends each request at its time, whatever became of those before."""
    prompts = [[*_tokens(recorded, trace.block_tokens, round)] for recorded in trace.asks]
    begun = time.perf_counter()

    async def one(recorded: RecordedAsk, prompt: Sequence[int]) -> TimedAnswer:
        await asyncio.sleep(recorded.at - (time.perf_counter() - begun))
        return await client.ask(prompt, recorded.output, f"{recorded.session}-{round}")

    return await asyncio.gather(*map(one, trace.asks, prompts))


def _tokens(ask: RecordedAsk, block: int, round: str) -> Iterator[int]:
    """Blocks with the same key have the same tokens; what fills no block is the request's own."""
    whole = ask.keys[: ask.tokens // block]
    for key in (*whole, f"{ask.session}/{ask.at}".encode()):
        draw = np.random.default_rng([*key, *round.encode()])
        count = block if key in whole else ask.tokens - block * len(whole)
        yield from draw.integers(FIRST_ID, SMALL.vocab, count).tolist()
