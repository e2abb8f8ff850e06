"""Live traffic of `penstock bench batch`, and its figures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.bench.batch import BatchRound, LiveTraffic, batch_figures, itl_p90, ttft_p90
from penstock.bench.e2e.prompts import PromptSource
from penstock.bench.harness import BenchReport
from penstock.load.asking import TimedAnswer
from penstock.load.events import CountedUsage


class EchoClient:
    """Knows when it was asked for what."""

    def __init__(self) -> None:
        self.begin = asyncio.get_running_loop().time()
        self.asked: list[tuple[float, tuple[int, ...], int, str]] = []

    async def ask(self, prompt: Any, tokens: int, name: str) -> TimedAnswer:
        at = asyncio.get_running_loop().time() - self.begin
        self.asked.append((at, tuple(prompt), tokens, name))
        return TimedAnswer(at, [], [], CountedUsage())


async def test_traffic_comes_at_the_same_times_with_other_prompts() -> None:
    traffic, found = LiveTraffic(per_s=200, seconds=0.2, prompt=5, output=3), []
    for name, times in (("alone", "0"), ("beside", "0"), ("beside", "1")):
        client: Any = EchoClient()
        answers = await traffic.run(client, PromptSource(1000, name), times)
        assert len(answers) == len(client.asked) > 0
        assert all(len(prompt) == 5 and tokens == 3 for _, prompt, tokens, _ in client.asked)
        found.append(client.asked)
    alone, beside, other = found
    assert len(alone) == len(beside) and {one[1] for one in alone}.isdisjoint(one[1] for one in beside)
    assert [one[3] for one in alone] == [f"alone-{number}" for number in range(len(alone))]
    assert all(abs(one[0] - two[0]) < 0.1 for one, two in zip(alone, beside, strict=True))
    assert len(other) != len(alone), "other times are other chances"


def test_percentiles_are_of_all_gaps_and_of_all_first_tokens() -> None:
    times = [[number + place * number for place in range(11)] for number in range(1, 11)]
    answers = [TimedAnswer(0.0, [1] * 11, each, CountedUsage()) for each in times]
    assert itl_p90(answers) == pytest.approx(9.0, abs=1.0) and ttft_p90(answers) == pytest.approx(9.0, abs=1.0)


def test_figures_of_a_batch() -> None:
    fields: dict[str, float] = {"idle": 0.5, "alone_tokens_per_s": 900.0, "beside_tokens_per_s": 400.0}
    fields |= {"live_itl_ms": 3.0, "live_ttft_ms": 40.0}
    rounds = [BatchRound(used=used, itl=1.02, ttft=1.2, **fields) for used in (0.95, 0.85, 0.7)]
    report = json.loads(BenchReport("batch", batch_figures(rounds)).json())
    found = {one["id"]: one for one in report["figures"]}
    assert found["batch_idle_share_used"]["value"] == 0.85
    assert found["batch_live_itl_p90_ratio"]["value"] == 1.02
    assert found["batch_live_ttft_p90_ratio"]["value"] == 1.2
    met = {id: one["met"] for id, one in found.items() if one.get("goal") is not None}
    assert met == {
        "batch_idle_share_used": True,
        "batch_live_itl_p90_ratio": True,
        "batch_live_ttft_p90_ratio": False,
    }
