"""The next turn of a long conversation: from the client's first byte to the worker's call."""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.bench.gateway.client import Client
from penstock.bench.gateway.mesh import MODEL
from penstock.gateway.api.openai.asks import chat_ask
from penstock.testing.emitter import age

_MESSAGE_TOKENS = 200
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "mix", "jugs")


class Dialog:
    """A conversation of about `tokens` tokens that goes on, turn by turn."""

    def __init__(self, client: Client, model: Path, tokens: int) -> None:
        self._client = client
        self._source = random.Random(tokens)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": f"Dialog of {tokens} tokens."}]
        known = 0
        while known < tokens:
            role = "assistant" if self._messages[-1]["role"] == "user" else "user"
            self._messages.append({"role": role, "content": self._text()})
            known += len(tokenizer.encode(self._messages[-1]["content"]).ids)
        if role == "assistant":
            self._messages.append({"role": "user", "content": "Go on."})

    def reading_s(self) -> float:
        """Seconds in which the body of the next turn is read, which no gateway is spared."""
        raw = json.dumps(self._body()).encode()
        begun = time.perf_counter()
        chat_ask(raw, 1)
        return time.perf_counter() - begun

    async def turn(self) -> float:
        """Seconds of one more turn."""
        request = self._client.encoded(self._body())
        stamps: list[float] = []
        done = await self._client.ask(request, stamped=lambda stamp, _now: stamps.append(stamp))
        if done.status != 200:
            raise RuntimeError(f"a turn was answered with {done.status}")
        self._messages.append({"role": "assistant", "content": " The"})
        self._messages.append({"role": "user", "content": self._text()})
        return -age(stamps[0], done.asked)

    def _body(self) -> dict[str, Any]:
        body = {"model": MODEL, "messages": self._messages, "stream": True, "max_tokens": 1, "logprobs": True}
        return {**body, "seed": 0}

    def _text(self) -> str:
        return " ".join(self._source.choice(_WORDS) for _ in range(_MESSAGE_TOKENS))


@dataclass(frozen=True, slots=True)
class TurnTime:
    """Medians of some turns, in seconds."""

    whole: float
    reading: float
    """Of reading the body alone."""


async def next_turn(dialog: Dialog, turns: int) -> TurnTime:
    """Takes some turns."""
    dialog.reading_s()  # the first time, decoders are made
    reading = statistics.median([dialog.reading_s() for _ in range(turns)])
    return TurnTime(statistics.median([await dialog.turn() for _ in range(turns)]), reading)
