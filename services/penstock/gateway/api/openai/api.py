"""OpenAI's two endpoints for completions, as the door serves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.gateway.api.inquiry import Visit
from penstock.gateway.api.openai.shapes import STYLE, ChatShape, CompletionShape
from penstock.gateway.request.ask import Ask


@dataclass(frozen=True, slots=True)
class CompletionInquiry:
    """One chat or legacy completion."""

    ask: Ask

    def shape(self, id: str, created: int) -> ChatShape | CompletionShape:
        """Writes the answer."""
        return (ChatShape if self.ask.chat else CompletionShape)(self.ask, id, created)

    async def settle(self) -> None:
        """Nothing is kept of a completion."""


class CompletionApi:
    """POST /v1/chat/completions or /v1/completions."""

    style = STYLE

    def __init__(self, read: Callable[[bytes, int, list[str] | None], Ask], max_choices: int) -> None:
        """`read` makes an ask of a body, the most choices that a request may have, and the list of ignored fields."""
        self._read = read
        self._max_choices = max_choices

    async def read(self, body: bytes, visit: Visit) -> CompletionInquiry:
        """The inquiry that a body makes. Raises InvalidRequest."""
        return CompletionInquiry(await visit.apart(lambda: self._read(body, self._max_choices, visit.ignored)))
