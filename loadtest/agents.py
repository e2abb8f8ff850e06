"""Agent-like load against a running mesh: sessions that resend a growing context every turn.

    python loadtest/agents.py --url http://127.0.0.1:8080 --sessions 8 --turns 5

Prints TTFT and ITL percentiles, tokens/s, and the share of prompt tokens that came from the cache, by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2
from rich.console import Console
from rich.table import Table

WORDS = ("the", "order", "shipped", "late", "because", "weather", "closed", "every", "road", "north", "of", "town")


@dataclass
class TurnCost:
    """What one turn of one session cost."""

    number: int
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Load:
    """What is asked of the mesh."""

    model: str
    turns: int
    new_words: int
    max_tokens: int


async def session(client: httpx2.AsyncClient, load: Load, number: int) -> list[TurnCost]:
    """Plays one session; every turn resends all earlier ones."""
    source = random.Random(f"{time.time_ns()}/{number}")
    messages: list[dict[str, str]] = []
    turns = []
    for count in range(1, load.turns + 1):
        text = " ".join(source.choice(WORDS) for _ in range(load.new_words))
        messages.append({"role": "user", "content": text})
        turn, answer = await ask(client, load, messages, count, f"load-{number}")
        messages.append({"role": "assistant", "content": answer})
        turns.append(turn)
    return turns


async def ask(
    client: httpx2.AsyncClient, load: Load, messages: list[dict[str, str]], number: int, key: str
) -> tuple[TurnCost, str]:
    """One streamed chat completion."""
    body = {
        "model": load.model,
        "messages": messages,
        "max_tokens": load.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    turn, text, last = TurnCost(number), "", time.perf_counter()
    started = last
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-affinity": key}) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            if event.get("usage"):
                turn.prompt_tokens = event["usage"]["prompt_tokens"]
                turn.tokens = event["usage"]["completion_tokens"]
                turn.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                if not turn.ttft_s:
                    turn.ttft_s = now - started
                else:
                    turn.gaps_s.append(now - last)
                last = now
                text += choice["delta"].get("content") or ""
    return turn, text


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def report(turns: Sequence[TurnCost], seconds: float) -> Table:
    """One row per turn number."""
    tokens = sum(turn.tokens for turn in turns)
    table = Table(title=f"{len(turns)} turns, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
    for column in ("turn", "prompt", "cached", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"):
        table.add_column(column, justify="right")
    for number in sorted({turn.number for turn in turns}):
        of = [turn for turn in turns if turn.number == number]
        ttft = [turn.ttft_s * 1e3 for turn in of]
        gaps = [gap * 1e3 for turn in of for gap in turn.gaps_s]
        prompt = sum(turn.prompt_tokens for turn in of)
        cached = sum(turn.cached_tokens for turn in of) / prompt if prompt else 0.0
        table.add_row(
            str(number),
            f"{prompt / len(of):.0f}",
            f"{cached:.0%}",
            f"{statistics.median(ttft):.1f}",
            f"{percentile(ttft, 0.99):.1f}",
            f"{percentile(gaps, 0.5):.2f}",
            f"{percentile(gaps, 0.99):.2f}",
        )
    return table


async def run(url: str, sessions: int, load: Load) -> None:
    """All sessions at once."""
    started = time.perf_counter()
    async with httpx2.AsyncClient(base_url=url, timeout=300) as client:
        played = await asyncio.gather(*(session(client, load, number) for number in range(sessions)))
    Console().print(report([turn for turns in played for turn in turns], time.perf_counter() - started))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="penstock-mini")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new-words", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    load = Load(given.model, given.turns, given.new_words, given.max_tokens)
    asyncio.run(run(given.url, given.sessions, load))


if __name__ == "__main__":
    main()
