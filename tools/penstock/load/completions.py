"""A streamed completion of token ids, read event by event: OpenAI's /v1/completions with `return_token_ids`, which
Penstock and vLLM share, and llama-server's own /completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.load.events import AnswerText, Begun, CountedUsage, EventReader, PromptDetails, nothing, shortened


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: CountedUsage | None = None
    error: Any = None


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _LlamaEvent(msgspec.Struct):
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    timings: _Timings | None = None
    error: Any = None


_COMPLETION = msgspec.json.Decoder(_Completion).decode
_LLAMA = msgspec.json.Decoder(_LlamaEvent).decode


class TokenReader(EventReader):
    """Takes the lines of one completion."""

    def __init__(self, begun: Begun = nothing) -> None:
        super().__init__(begun)
        self.ids: list[int] = []

    def event(self, data: bytes, now: float) -> None:
        """One chunk. A part without ids is one too, of a server that does not tell them."""
        event = _COMPLETION(data)
        if event.error:
            self.error = shortened(event.error)
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            self.finish = choice.finish_reason or self.finish
            if choice.token_ids:
                self._gained(choice.token_ids, now)
            elif choice.text and not self.sizes:
                self.came(now)

    def answer(self) -> AnswerText:
        """Its tokens."""
        return AnswerText(ids=tuple(self.ids))

    def _gained(self, ids: Sequence[int], now: float) -> None:
        self.ids += ids
        self.sizes.append(len(ids))
        self.came(now)


class LlamaReader(TokenReader):
    """The same of llama-server."""

    def event(self, data: bytes, now: float) -> None:
        """One chunk; the last one has the counts, and no tokens that had not come."""
        event = _LLAMA(data)
        if event.error:
            self.error = shortened(event.error)
        elif not event.stop:
            if event.tokens:
                self._gained(event.tokens, now)
        else:
            self.finish = event.stop_type or "stop"
            self.usage = CountedUsage(
                prompt_tokens=event.tokens_evaluated,
                completion_tokens=event.tokens_predicted or len(self.ids),
                prompt_tokens_details=PromptDetails(event.timings.cache_n if event.timings else None),
            )
