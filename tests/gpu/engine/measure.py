"""How fast a runner is, on any device: the numbers of one table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from penstock.engine.forward.runner import Runner
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians. Tokens per second of all sequences together."""

    prefill: dict[int, float]
    """By tokens of the prompt, computed in one step."""
    decode: dict[int, float]
    """By sequences that decode side by side."""
    verify: float
    """Seconds of a step that verifies four drafts, over those of a plain step, of one sequence."""
    used_bytes: int
    """Of the device's memory, by all processes together, once all that was measured; 0 on a CPU."""


def speed(
    runner: Runner,
    prompts: tuple[int, ...] = (512, 2048),
    batches: tuple[int, ...] = (1, 8, 32),
    context: int = 128,
    tokens: int = 64,
    rounds: int = 5,
) -> Speed:
    """Greedy, from random tokens. The page memory holds the longest prompt, and `context` + 2 * `tokens` tokens of each
    sequence of the largest batch. The first round of each, in which kernels are compiled and steps captured, does not
    count."""
    prefill = {length: length / _median(partial(_prompt, runner, length), rounds) for length in prompts}
    decode = {count: count * tokens / _median(_decode(runner, count, context, tokens), rounds) for count in batches}
    plain = _median(_decode(runner, 1, context, tokens), rounds)
    verify = _median(_decode(runner, 1, context, tokens, drafts=4), rounds)
    free, total = torch.cuda.mem_get_info(runner.memory.data.device) if runner.memory.data.is_cuda else (0, 0)
    return Speed(prefill, decode, verify / plain, total - free)


def _median(job: Callable[[], None], rounds: int) -> float:
    job()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _prompt(runner: Runner, length: int) -> None:
    tokens = torch.arange(length).mul_(7919).remainder_(200).tolist()
    runner.step([_run(runner, tokens, 0, length, 0, length, ())])


def _decode(runner: Runner, count: int, context: int, tokens: int, drafts: int = 0) -> Callable[[], None]:
    """A job of `tokens` steps of `count` sequences. They attend to whatever the page memory holds."""
    most = context + tokens + drafts

    def job() -> None:
        texts = [[1 + at] * context for at in range(count)]
        for _ in range(tokens):
            length = len(texts[0])
            some = tuple(range(2, 2 + drafts))
            runs = [_run(runner, text, length - 1, 1, at, most, some) for at, text in enumerate(texts)]
            for text, answer in zip(texts, runner.step(runs), strict=True):
                text.append(answer[0].token)

    return job


def _run(runner: Runner, tokens: list[int], start: int, count: int, at: int, most: int, drafts: tuple[int, ...]) -> Run:
    """Of sequence `at`, whose pages hold `most` tokens."""
    each = -(-most // runner.memory.block_size)
    pages = list(range(1 + at * each, 1 + (at + 1) * each))
    params = SamplingParams(max_tokens=most, temperature=0.0)
    return Run(Choice(params, frozenset(), tokens, 1, drafts), start, count, pages, (f"{at} of {most}", 0))
