"""Live traffic that does not wait for answers: requests come when they come, the same in each phase of a round."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bench.e2e.answers import TimedAnswer, percentile
from penstock.bench.e2e.client import TimedClient
from penstock.bench.e2e.loads import PromptSource, everything


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTraffic:
    """Requests whose distances are random, as those of people who know nothing of each other."""

    per_s: float
    seconds: float
    prompt: int = 192
    output: int = 48

    async def run(self, client: TimedClient, source: PromptSource, times: str) -> Sequence[TimedAnswer]:
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
    return percentile((gap for answer in answers for gap in answer.gaps), 90)


def ttft_p90(answers: Sequence[TimedAnswer]) -> float:
    """In seconds."""
    return percentile((answer.time_to_first_token for answer in answers), 90)
