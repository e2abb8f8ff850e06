"""What it costs to verify drafts, and so what drafts can bring at most: steps of the bare engine whose drafts come for
nothing and are all right."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from statistics import median

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
_FIRST = 300
"""No prompt has tokens below: bytes and special ones are among them."""


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
        draw = random.Random(round)
        return tuple(draw.randrange(_FIRST, vocabulary) for _ in range(_PROMPT))

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

        async def answer(drafts: int, round: int) -> float:
            """Tokens per second behind the first; the first engine's answers are those that the others' drafts know."""
            name, ids = f"{drafts}/{round}", list[int]()
            known[name] = known.get(f"0/{round}", [])
            sampling = SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
            first = last = 0.0
            async with aclosing(engines[drafts].generate(Request(name, prompt(round), sampling))) as updates:
                async for update in updates:
                    last = time.perf_counter()
                    first = first or last
                    ids += [token.token for token in update.tokens]
            known[name] = [*prompt(round), *ids]
            return (_ANSWER - 1) / (last - first)

        def subject(drafts: int) -> Measure[float]:
            return lambda round: answer(drafts, round)

        for round in range(rounds + 1):
            await answer(0, round)
        rates = await interleave({str(drafts): subject(drafts) for drafts in counts}, rounds)
    plain = rates["0"]
    found = [figure(f"rows_rate_{pair}", plain, "tokens/s", "scale")]
    for drafts in counts[1:]:
        gains = [one / other for one, other in zip(rates[str(drafts)], plain, strict=True)]
        print(f"{pair}, {drafts} right drafts: {median(gains):.3g}", file=sys.stderr, flush=True)
        found.append(figure(f"rows_gain_{drafts}_{pair}", gains, "ratio", "no drafts"))
        found.append(
            figure(f"rows_step_{drafts}_{pair}", [(1 + drafts) / gain for gain in gains], "ratio", "no drafts")
        )
    return found
