"""Drafts change no chances: what a mesh samples with them follows the model's own distribution."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from itertools import product

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import DRAFTING, ask, drafting, prompt

TOKENS = (65, 70, 80, 90, 100)
"""All that is ever said: a vocabulary small enough to count every text."""
ASKS = 600
SAMPLED = SamplingParams(
    max_tokens=3, temperature=4.0, ignore_eos=True, logprobs=0, logit_bias=dict.fromkeys(TOKENS, 99.0)
)


async def test_sampled_answers_with_drafts_follow_the_models_distribution(tiny, other, meshes, oracle, http):
    """Chi-square over the 25 texts of the second and third token, which are drafted by a model with other weights, so
    some are accepted and some are not. The bound is the 99.99th percentile for 24 degrees of freedom."""
    given = prompt("what comes", 40)
    async with meshes(MeshSetup(model=tiny, draft=str(other), aggregated=True, engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        gate = asyncio.Semaphore(8)

        async def one(seed):
            async with gate:
                return await ask(http, mesh, given, replace(SAMPLED, seed=seed))

        answers = await asyncio.gather(*(one(seed) for seed in range(ASKS)))
    drafted, accepted = sum(a.drafted for a in answers), sum(a.accepted for a in answers)
    assert 0.1 * drafted < accepted < 0.9 * drafted > 100, "some drafts are right and some are wrong"
    seen = Counter(tuple(answer.ids[1:]) for answer in answers)
    expected = await shares(oracle, given)
    assert math.isclose(sum(expected.values()), 1)
    assert score(seen, expected) < 58.6
    assert score(Counter(dict.fromkeys(expected, ASKS / 25)), expected) > 58.6, "other chances would be seen"


async def shares(oracle, given):
    """How likely the second and third token are, from the model's own chances of each token behind each text."""

    async def chances(text):
        forced = [replace(SAMPLED, max_tokens=1, temperature=0.0, logit_bias={token: 100.0}) for token in TOKENS]
        own = [(await oracle([*given, *text], sampling)).logprobs[0] for sampling in forced]
        found = [math.exp(logprob / SAMPLED.temperature) for logprob in own]
        return dict(zip(TOKENS, (one / sum(found) for one in found), strict=True))

    after = {text: await chances(text) for count in range(3) for text in product(TOKENS, repeat=count)}
    return {
        (second, third): sum(
            after[()][first] * after[(first,)][second] * after[(first, second)][third] for first in TOKENS
        )
        for second, third in product(TOKENS, repeat=2)
    }


def score(seen, expected):
    """Chi-square."""
    return sum((seen[text] - ASKS * share) ** 2 / (ASKS * share) for text, share in expected.items())
