"""The next turn of a long conversation: from the client's first byte to the worker's call."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.bench.gateway.client import Client
from penstock.bench.gateway.mesh import MODEL
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

    async def turn(self) -> float:
        """Seconds of one more turn."""
        body = {"model": MODEL, "messages": self._messages, "stream": True, "max_tokens": 1, "logprobs": True}
        request = self._client.encoded({**body, "seed": 0})
        stamps: list[float] = []
        done = await self._client.ask(request, stamped=lambda stamp, _now: stamps.append(stamp))
        if done.status != 200:
            raise RuntimeError(f"a turn was answered with {done.status}")
        self._messages.append({"role": "assistant", "content": " The"})
        self._messages.append({"role": "user", "content": self._text()})
        return -age(stamps[0], done.asked)

    def _text(self) -> str:
        return " ".join(self._source.choice(_WORDS) for _ in range(_MESSAGE_TOKENS))


async def next_turn_s(dialog: Dialog, turns: int) -> float:
    """The median of some turns."""
    return statistics.median([await dialog.turn() for _ in range(turns)])
