"""What it costs to verify drafts, and so what drafts can bring at most: steps of the bare engine whose drafts come for
nothing and are all right."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from statistics import median

from penstock.bench.e2e.prompts import PromptSource
from penstock.bench.harness import Figure, Measure, figure, interleave
from penstock.bench.speculation.meshes import PAIRS, checkpoints
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.hooks import DraftAsk
from penstock.engine.request import Request, SamplingParams
from penstock.testing.drafters import InlineDrafter

_COUNTS = (0, 1, 2, 4, 8, 16)
"""Drafts of a step."""
_PROMPT, _ANSWER = 256, 192
"""Tokens."""


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """The steps behind the first token of an answer."""

    tokens: int
    count: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all of them."""
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        """Of one."""
        return self.seconds / self.count


async def row_figures(quick: bool) -> list[Figure]:
    """Of both pairs' targets, one stream."""
    rounds, pairs, counts = (1, ("embedded",), (0, 4)) if quick else (5, tuple(PAIRS), _COUNTS)
    return [one for pair in pairs for one in await _pair_figures(pair, counts, rounds)]


async def _pair_figures(pair: str, counts: Sequence[int], rounds: int) -> list[Figure]:
    model, _ = checkpoints(pair)
    vocabulary = inspect(model).config.vocab_size
    known: dict[str, list[int]] = {}
    """Texts by request."""

    def right(ask: DraftAsk) -> Sequence[int]:
        return known[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k]

    def prompt(round: int) -> tuple[int, ...]:
        return tuple(PromptSource(vocabulary, f"rows/{round}").tokens(_PROMPT))

    async with AsyncExitStack() as stack:
        engines = {}
        for drafts in counts:
            config = EngineConfig(
                model=model,
                dtype="bfloat16",
                kv_pool_tokens=4096,
                draft_tokens=drafts,
                draft_always=True,
                lookup_tokens=0,
                threads=2,
            )
            engines[drafts] = await stack.enter_async_context(Engine.open(config, InlineDrafter(right)))

        async def answer(drafts: int, round: int) -> DraftedSteps:
            """The first engine's answers are those that the others' drafts know."""
            engine, name, ids = engines[drafts], f"{drafts}/{round}", list[int]()
            before = engine.stats().steps
            known[name] = known.get(f"0/{round}", [])
            sampling = SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
            first = last = 0.0
            async with aclosing(engine.generate(Request(name, prompt(round), sampling))) as updates:
                async for update in updates:
                    last = time.perf_counter()
                    first = first or last
                    ids += [token.token for token in update.tokens]
            known[name] = [*prompt(round), *ids]
            return DraftedSteps(_ANSWER - 1, engine.stats().steps - before - 1, last - first)  # one is the prompt's

        def subject(drafts: int) -> Measure[DraftedSteps]:
            return lambda round: answer(drafts, round)

        for round in range(rounds + 1):
            await answer(0, round)
        measured = await interleave({str(drafts): subject(drafts) for drafts in counts}, rounds)
    plain = measured["0"]
    found = [figure(f"rows_rate_{pair}", [one.tokens_per_s for one in plain], "tokens/s", "scale")]
    for drafts in counts[1:]:
        pairs = list(zip(measured[str(drafts)], plain, strict=True))
        gains = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
        print(f"{pair}, {drafts} right drafts: {median(gains):.3g}", file=sys.stderr, flush=True)
        found.append(figure(f"rows_gain_{drafts}_{pair}", gains, "ratio", "no drafts"))
        steps = [one.step_s / other.step_s for one, other in pairs]
        found.append(figure(f"rows_step_{drafts}_{pair}", steps, "ratio", "no drafts"))
    return found
