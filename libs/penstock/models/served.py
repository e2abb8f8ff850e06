"""The turns of evaluation asked of a running mesh, as an agent framework asks: by the official client of OpenAI's API.

Calls are asked for with `tools` alone, so that `tool_choice` is `auto`: that is what frameworks send when the model is
to choose between a call and a text. The text is free until the model opens a call; then the mesh's grammar holds: the
name of a tool that is offered, and arguments that follow its schema, strict or not. JSON is asked for with a
`response_format` of the type `json_schema`, strict.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from openai import AsyncOpenAI
from tokenizers import Tokenizer

from .judging import Tally, Written, judge
from .turns import CONTEXT, AssistantTurn, Calls, canonical, documents, fitting

LABELS = ("call", "json")
"""Turns for which the mesh has a grammar."""
_MOST_TOKENS = 300
_AT_ONCE = 8


async def written(client: AsyncOpenAI, model: str, turn: AssistantTurn) -> Written:
    """What the mesh answers, greedily, after the right history. Raises OpenAIError."""
    request: dict[str, Any] = {"tools": list(turn.tools)} if turn.tools else {}
    if turn.schema is not None:
        form = {"name": "answer", "schema": {**turn.schema, "additionalProperties": False}, "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": form}
    create: Any = client.chat.completions.create  # its overloads want more types than a turn has
    answer = await create(
        model=model, messages=turn.messages, temperature=0, max_completion_tokens=_MOST_TOKENS, **request
    )
    message = answer.choices[0].message
    return Written(message.content or "", _calls(message.tool_calls or ()))


def _calls(found: Iterable[Any]) -> Calls | None:
    try:
        return [(call.function.name, canonical(json.loads(call.function.arguments))) for call in found]
    except ValueError:  # one was cut
        return None


async def answers(
    client: AsyncOpenAI, model: str, asked: Sequence[Sequence[AssistantTurn]]
) -> list[tuple[AssistantTurn, Written]]:
    """The turns of several documents with what the mesh wrote for them: those of one document one after the other, as
    those of a session come, and several documents at once. Raises OpenAIError."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(turns: Sequence[AssistantTurn]) -> list[tuple[AssistantTurn, Written]]:
        async with places:
            return [(turn, await written(client, model, turn)) for turn in turns]

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(turns)) for turns in asked]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [answer for task in running for answer in task.result()]


async def score_served(
    client: AsyncOpenAI,
    model: str,
    tokenizer: Tokenizer,
    *,
    count: int,
    seed: int,
    kinds: Sequence[str],
    context: int = CONTEXT,
) -> Tally:
    """Ask for every call and every JSON answer that `evaluate.score` decodes freely. Raises OpenAIError."""
    tally = Tally()
    asked = [
        [turn for turn, *_ in fitting(tokenizer, doc, context) if turn.label in LABELS]
        for doc in documents((*kinds, "json"), count, seed)
    ]
    for turn, found in await answers(client, model, asked):
        tally.add(judge(turn, found))
    return tally
