"""POST /v1/messages, as the door serves it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.api.anthropic.asks import messages_ask
from penstock.gateway.api.anthropic.shapes import STYLE, MessageShape
from penstock.gateway.api.inquiry import Visit
from penstock.gateway.request.ask import Ask


@dataclass(frozen=True, slots=True)
class MessageInquiry:
    """One request for a message."""

    ask: Ask

    def shape(self, id: str, created: int) -> MessageShape:
        """Writes the message."""
        return MessageShape(self.ask, id, created)

    async def settle(self) -> None:
        """Nothing is kept of a message."""


class MessagesApi:
    """POST /v1/messages."""

    style = STYLE

    async def read(self, body: bytes, visit: Visit) -> MessageInquiry:
        """The inquiry that a body makes. Raises InvalidRequest."""
        return MessageInquiry(await visit.apart(lambda: messages_ask(body, visit.ignored)))
