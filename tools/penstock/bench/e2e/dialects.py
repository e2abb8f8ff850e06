"""How each server is asked for a completion of token ids, and where its events say what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.bench.e2e.answers import TimedAnswer


class Dialect(Protocol):
    """One kind of API."""

    path: str

    def body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """Of a streamed request for exactly `tokens` tokens, greedy, that tells their ids."""
        ...

    def read(self, event: Mapping[str, Any], answer: TimedAnswer, now: float) -> None:
        """Adds what the event says."""
        ...


class OpenAi:
    """/v1/completions, with the further fields that Penstock and vLLM share."""

    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: Mapping[str, Any], answer: TimedAnswer, now: float) -> None:
        for choice in event.get("choices", ()):
            answer.gained(choice.get("token_ids") or (), now)
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens") or 0


class LlamaServer:
    """llama-server's own /completion."""

    path = "/completion"

    def body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], answer: TimedAnswer, now: float) -> None:
        if not event.get("stop"):
            answer.gained(event["tokens"], now)
            return
        timings = event.get("timings") or {}
        answer.prompt_tokens = event.get("tokens_evaluated", 0)
        answer.cached_tokens = timings.get("cache_n", 0)
