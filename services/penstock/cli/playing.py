"""Plays a session through the official client and keeps the cost of each request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from penstock.cli.script import Script

Json = dict[str, Any]
_MOST_CALLS = 4
"""Requests of one turn; a model that calls tools more often has lost its way."""
_MOST_TOKENS = 200


@dataclass
class ToolCall:
    """One tool call and its result."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    result: str = ""


@dataclass
class Exchange:
    """One request and its answer."""

    turn: int
    """From 1."""
    user: str
    """Empty when the request brings tool results."""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by the tier where their KV was."""
    drafted: int = 0
    accepted: int = 0
    decode_s: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Over all tiers."""
        return sum(self.cached.values())

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None when there was only that."""
        return (self.output_tokens - 1) / self.decode_s if self.output_tokens > 1 and self.decode_s > 0 else None


async def play(client: AsyncOpenAI, model: str, script: Script, session: str) -> AsyncIterator[Exchange]:
    """Every request of the session, in order; each exchange is yielded when its answer and tool results are there."""
    messages: list[Json] = [{"role": "system", "content": script.system}]
    for number, user in enumerate(script.turns, 1):
        messages.append({"role": "user", "content": user})
        for _ in range(_MOST_CALLS):
            into = Exchange(number, user)
            exchange = await _ask(client, messages, into, model=model, script=script, session=session)
            messages.append(_said(exchange))
            for call in exchange.calls:
                call.result = script.answer(call.name, call.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": call.result})
            yield exchange
            if not exchange.calls:
                break
            user = ""


async def _ask(
    client: AsyncOpenAI, messages: list[Json], into: Exchange, *, model: str, script: Script, session: str
) -> Exchange:
    began = time.perf_counter()
    create: Any = client.chat.completions.create  # its overloads want more types than a session has
    stream = await create(
        model=model,
        messages=messages,
        tools=list(script.tools),
        temperature=0,
        max_completion_tokens=_MOST_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-session-affinity": session},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            _take(choice, into)
            if into.ttft_s == 0 and (into.text or into.calls):
                into.ttft_s = time.perf_counter() - began
        if chunk.usage is not None:
            _count(chunk.usage, into)
    into.total_s = time.perf_counter() - began
    return into


def _take(choice: Any, into: Exchange) -> None:
    into.finish = choice.finish_reason or into.finish
    into.text += choice.delta.content or ""
    for part in choice.delta.tool_calls or []:
        while len(into.calls) <= part.index:
            into.calls.append(ToolCall())
        call = into.calls[part.index]
        call.id = part.id or call.id
        if part.function is not None:
            call.name += part.function.name or ""
            call.arguments += part.function.arguments or ""


def _count(usage: Any, into: Exchange) -> None:
    into.prompt_tokens, into.output_tokens = usage.prompt_tokens, usage.completion_tokens
    more = (usage.model_extra or {}).get("penstock", {})
    into.cached = {tier: tokens for tier, tokens in more.get("cached_tokens", {}).items() if tokens}
    into.drafted, into.accepted = more.get("drafted_tokens", 0), more.get("accepted_tokens", 0)
    times = more.get("times", {})
    into.decode_s = times.get("decode", 0.0)


def _said(exchange: Exchange) -> Json:
    message: Json = {"role": "assistant", "content": exchange.text or None}
    if exchange.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in exchange.calls
        ]
    return message
