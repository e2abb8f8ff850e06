"""`penstock bench cores`: our engine on cores that another process uses, and at the contexts that agents have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.bench.engine.process import Failed
from penstock.bench.engine.rounds import THREADS, Asked, prompt
from penstock.bench.engine.shapes import SMALL, checkpoint, weight_bytes
from penstock.bench.engine.subjects import OURS, Places, Subject
from penstock.bench.harness import BenchReport, Figure, figure, interleave, missing

_STREAMS = 8
_CONTEXTS = (16, 512, 2000)
_OWN = 48
"""Tokens that a stream does not share with the others, where they have a common beginning."""
_LIMIT_S = 600.0
_ROOM = {"threads": THREADS, "streams": _STREAMS, "tokens": 2200, "room": _STREAMS * 2200}


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Tokens/s of one stream without and with another process that has a busy thread on each core."""

    alone: float
    beside: float


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """Seconds of a step of streams that have nothing in common, and of some whose contexts begin alike."""

    own: float
    common: float


async def measure(quick: bool) -> BenchReport:
    """Runs the bench, on the shape of 135 million parameters."""
    rounds, steps = (2, 8) if quick else (5, 24)
    asked = Asked(Subject(OURS), Places.default(), SMALL, _ROOM)

    async def shared(_: int) -> SharedCores:
        alone = await _step_s(asked, 1, _CONTEXTS[0], 4 * steps)
        with _busy(THREADS):
            beside = await _step_s(asked, 1, _CONTEXTS[0], 4 * steps)
        return SharedCores(1 / alone, 1 / beside)

    async def contexts(_: int) -> Sequence[float]:
        return [await _step_s(asked, _STREAMS, context, steps) for context in _CONTEXTS]

    async def common(_: int) -> CommonPrefix:
        own = await _step_s(asked, _STREAMS, _CONTEXTS[-1], steps)
        return CommonPrefix(own, await _step_s(asked, _STREAMS, _CONTEXTS[-1], steps, common=_CONTEXTS[-1] - _OWN))

    try:
        cores = (await interleave({"shared": shared}, rounds))["shared"]
        seconds = (await interleave({"contexts": contexts}, rounds))["contexts"]
        prefixes = (await interleave({"common": common}, rounds))["common"]
    except Failed as error:
        return BenchReport("cores", [missing("beside_busy_vs_alone", "ratio", str(error), 0.5)])
    finally:
        await asked.close()
    weights = weight_bytes(checkpoint(SMALL, asked.places.models))
    return BenchReport("cores", [*shared_figures(cores), *context_figures(seconds, weights), *prefix_figures(prefixes)])


def shared_figures(found: Sequence[SharedCores]) -> list[Figure]:
    """Of the rounds of one stream."""
    shares = [one.beside / one.alone for one in found]
    return [
        figure("beside_busy_vs_alone", shares, "ratio", "alone; a fair share is a half", 0.5),
        figure("alone_tokens_per_s", [one.alone for one in found], "tokens/s", "scale"),
        figure("beside_busy_tokens_per_s", [one.beside for one in found], "tokens/s", "scale"),
    ]


def context_figures(found: Sequence[Sequence[float]], weights: int) -> list[Figure]:
    """Milliseconds of a step by context, and how fast it reads keys and values beside how fast it reads weights."""
    more = _STREAMS * (_CONTEXTS[-1] - _CONTEXTS[0]) * SMALL.kv_bytes
    rates = [(more / (step[-1] - step[0])) / (weights / step[0]) for step in found]
    return [
        figure("kv_read_rate_vs_weights", rates, "ratio", "bytes/s of weights, in a step of 16 tokens of context", 1.0),
        *(
            figure(f"step_ms_{_STREAMS}_{context}", [1e3 * step[at] for step in found], "ms", "scale")
            for at, context in enumerate(_CONTEXTS)
        ),
    ]


def prefix_figures(found: Sequence[CommonPrefix]) -> list[Figure]:
    """What a step gains when the contexts of its streams begin alike."""
    return [
        figure("step_common_prefix_vs_own", [one.common / one.own for one in found], "ratio", "nothing in common"),
        figure(f"step_ms_{_STREAMS}_common", [1e3 * one.common for one in found], "ms", "scale"),
    ]


async def _step_s(asked: Asked, streams: int, context: int, steps: int, common: int = 0) -> float:
    """Seconds of a step of so many streams with that context each, whose first `common` tokens are the same."""
    first = prompt(SMALL, common, (context, streams)) if common else []
    prompts = [[*first, *prompt(SMALL, context - common, (context, number))] for number in range(streams)]
    seconds: float = await asked.ask("decode", _LIMIT_S, prompts=prompts, steps=steps, shared=bool(common))
    return seconds / steps


@contextmanager
def _busy(threads: int) -> Iterator[None]:
    """Processes that do nothing, as fast as they can."""
    running = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(threads)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()
