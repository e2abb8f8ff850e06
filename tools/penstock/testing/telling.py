"""A stream as the official client hears it, with something that happens in its middle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI


@dataclass
class Told:
    """What a client heard of one answer."""

    id: str = ""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """As the usage says."""
    drafted: Mapping[str, int] = field(default_factory=dict)
    """Drafts that were verified for it, by proposer."""
    arrivals: list[float] = field(default_factory=list)
    """When its events came: `time.monotonic`. First when it was asked for."""
    decode: str = ""
    """The id of the decode worker of its first plan."""

    @property
    def said(self) -> tuple[list[int], str, str, int, int]:
        """All that must not depend on how it came to be."""
        return self.ids, self.text, self.finish, self.prompt_tokens, self.completion_tokens

    def gap_s(self, since: float) -> float:
        """The longest wait for an event that ended after `since`."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs if after >= since), default=0.0)


async def tell(
    client: AsyncOpenAI,
    body: dict[str, Any],
    *,
    at: int = 0,
    act: Callable[[], object] = lambda: None,
    told: Told | None = None,
) -> Told:
    """Streams the answer to `body`, of which `act` is called once when so many of its tokens have come; with 0 before
    the first. A body with messages is one of a chat. Fills `told`, if it is given. Raises openai.APIError."""
    told = told or Told()
    told.arrivals.append(time.monotonic())
    fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
    fields["extra_headers"] = {"x-penstock-explain": "plan"}
    fields["extra_body"] = {"return_token_ids": True, **body.get("extra_body", {})}
    create: Any = client.chat.completions.create if "messages" in body else client.completions.create
    if acted := not at:
        act()
    stream = await create(**fields)
    if plans := json.loads(stream.response.headers.get("x-penstock-plan", "[]")):
        told.decode = plans[0]["decode"]
    async for chunk in stream:
        told.arrivals.append(time.monotonic())
        told.id = chunk.id
        if chunk.usage is not None:
            told.prompt_tokens, told.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            told.drafted = (chunk.usage.model_extra["penstock"].get("drafts") or {}).get("verified", {})
        for choice in chunk.choices:
            told.ids += getattr(choice, "token_ids", None) or []
            told.text += (choice.delta.content if "messages" in body else choice.text) or ""
            told.finish = choice.finish_reason or told.finish
        if not acted and len(told.ids) >= at:
            acted = True
            act()
    return told
