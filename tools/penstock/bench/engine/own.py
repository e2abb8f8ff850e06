"""Measurements of our engine alone: lossless weights, long contexts, verifying drafts, starting, memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.bench.engine.cells import PROMPT
from penstock.bench.engine.limits import Memory
from penstock.bench.engine.process import Failed
from penstock.bench.engine.rounds import THREADS, Asked, prompt
from penstock.bench.engine.shapes import BIG, checkpoint, weight_bytes
from penstock.bench.engine.steps import step_overhead_us
from penstock.bench.engine.subjects import OURS, Places, Subject, running
from penstock.bench.harness import Figure, figure, interleave, missing
from penstock.testing.checkpoints import write_checkpoint

_LIMIT_S = 300.0
_LONG = 8192
_POOL = 2304
"""Tokens of the page pool where memory is measured; nearly all of it is used."""
_ROOM = {"threads": THREADS, "streams": 1, "tokens": _LONG + 64, "room": _LONG + 64}


@dataclass(frozen=True, slots=True)
class Long:
    """Seconds of a step after a short and after a long context, and of reading what the long one has more."""

    short: float
    long: float
    reading: float


async def measure(places: Places, memory: Memory, quick: bool) -> list[Figure]:
    """All of it, on the big shape."""
    rounds, steps = _effort(quick)
    plain = Asked(Subject(OURS), places, BIG, {**_ROOM, "drafts": True})
    packed = Asked(Subject(OURS, "lossless"), places, BIG, _ROOM)
    try:
        return [
            *await _lossless(plain, packed, rounds, steps),
            await _long(plain, memory, rounds, steps),
            *await _verify(plain, rounds, steps),
        ]
    finally:
        await plain.close()
        await packed.close()


async def long_context(places: Places, memory: Memory, quick: bool) -> Figure:
    """What a step costs more after 8,192 tokens, beside reading their keys and values; on the big shape."""
    plain = Asked(Subject(OURS), places, BIG, _ROOM)
    try:
        return await _long(plain, memory, *_effort(quick))
    finally:
        await plain.close()


def _effort(quick: bool) -> tuple[int, int]:
    """Rounds, and steps in each."""
    return (2, 4) if quick else (5, 12)


async def _lossless(plain: Asked, packed: Asked, rounds: int, steps: int) -> list[Figure]:
    async def step(one: Asked) -> float:
        return await _step(one, PROMPT, steps)

    id, goal = "decode_b1_1b_lossless_vs_bf16", 1.2
    try:
        found = await interleave({"plain": lambda _: step(plain), "lossless": lambda _: step(packed)}, rounds)
    except Failed as error:
        return [missing(id, "ratio", str(error), goal)]
    pairs = zip(found["plain"], found["lossless"], strict=True)
    return [
        figure(id, [one / other for one, other in pairs], "ratio", "our own bfloat16", goal),
        figure("decode_b1_1b_penstock_lossless_tokens_per_s", _inverse(found["lossless"]), "tokens/s", "for scale"),
    ]


async def _long(plain: Asked, memory: Memory, rounds: int, steps: int) -> Figure:
    async def sample(number: int) -> Long:
        before = memory.rate()
        short, long = await _step(plain, PROMPT, steps), await _step(plain, _LONG, steps)
        more = (_LONG - PROMPT) * BIG.kv_bytes
        return Long(short, long, 2 * more / (before + memory.rate()))

    id, goal = "decode_8k_1b_vs_kv_cost", 1.2
    try:
        found = (await interleave({"long": sample}, rounds))["long"]
    except Failed as error:
        return missing(id, "ratio", str(error), goal)
    costs = [(one.long - one.short) / one.reading for one in found]
    return figure(id, costs, "ratio", "reading the longer context's KV once", goal, lower_is_better=True)


async def _verify(plain: Asked, rounds: int, steps: int) -> list[Figure]:
    async def sample(number: int) -> dict[str, float]:
        found: dict[str, float] = await plain.ask("verify", _LIMIT_S, prompt=prompt(BIG, PROMPT, number), steps=steps)
        return found

    id, goal = "verify5_vs_step_1b", 1.25
    try:
        found = (await interleave({"verify": sample}, rounds))["verify"]
    except Failed as error:
        return [missing(id, "ratio", str(error), goal)]
    costs = [one["verify_s"] / one["step_s"] for one in found]
    given = [one["tokens_per_step"] for one in found]
    return [
        figure(id, costs, "ratio", "a step of one token", goal, lower_is_better=True),
        figure("verify5_tokens_per_step_1b", given, "tokens", "5: every draft was right"),
    ]


async def overhead(quick: bool) -> list[Figure]:
    """What the engine does beside the model."""
    rounds = 3 if quick else 9
    with TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory))
        many = await step_overhead_us(model, 32, rounds=rounds)
        one = await step_overhead_us(model, 1, rounds=rounds)
    whole = "engine, thread and readers around a model that answers at once"
    return [
        figure("step_overhead_us_b32", many, "us", whole, 150.0, lower_is_better=True),
        figure("step_overhead_us_b1", one, "us", whole),
    ]


async def start(places: Places, quick: bool) -> list[Figure]:
    """From nothing to the first token, and how much memory it takes to serve. The first start is not counted."""
    times: list[float] = []
    over: list[float] = []
    try:
        for _ in range(2 if quick else 4):
            seconds, bytes_over = await _start(places)
            times.append(seconds)
            over.append(bytes_over)
    except Failed as error:
        return [missing("load_1b_s", "s", str(error), 3.0), missing("peak_over_weights_mb", "MB", str(error), 350.0)]
    return [
        figure("load_1b_s", times[1:], "s", "process start to first token, page cache warm", 3.0, lower_is_better=True),
        figure(
            "peak_over_weights_mb",
            [each / 1e6 for each in over[1:]],
            "MB",
            "peak of resident memory, file mappings included, less bfloat16 weights and KV pool",
            350.0,
            lower_is_better=True,
        ),
    ]


async def _start(places: Places) -> tuple[float, float]:
    """Seconds to the first token; bytes of the peak after a long prompt and a batch, less weights and pool."""
    directory = checkpoint(BIG, places.models)
    streams = 16
    values = {"threads": THREADS, "streams": streams, "tokens": 1200, "room": 0, "settings": {"kv_pool_tokens": _POOL}}
    begin = time.perf_counter()
    async with running(Subject(OURS), places) as talk:
        await talk.ask("load", _LIMIT_S, checkpoint=str(directory), kind="bfloat16", **values)
        await talk.ask("prefill", _LIMIT_S, prompt=prompt(BIG, 8, "start"))
        seconds = time.perf_counter() - begin
        await talk.ask("prefill", _LIMIT_S, prompt=prompt(BIG, 1024, "start"))
        prompts = [prompt(BIG, PROMPT, number) for number in range(streams)]
        await talk.ask("decode", _LIMIT_S, prompts=prompts, steps=4)
        memory = await talk.ask("memory", _LIMIT_S)
    return seconds, memory["peak"] - weight_bytes(directory) - _POOL * BIG.kv_bytes


async def _step(one: Asked, context: int, steps: int) -> float:
    """Seconds of a step of one stream."""
    seconds: float = await one.ask("decode", _LIMIT_S, prompts=[prompt(BIG, context, 0)], steps=steps)
    return seconds / steps


def _inverse(values: Sequence[float]) -> list[float]:
    return [1 / value for value in values]
