"""Sessions that nobody has chosen: drawn by seed from the words and phrasings that the embedded model never met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_KINDS = ("L2", "L3", "everyday")


@dataclass(frozen=True)
class UnseenSession:
    """A drawn session, and how the model did."""

    kind: str
    """As the model's card has it."""
    tools: int
    right: int
    """Calls with the right name and all arguments right."""
    calls: int


async def play_unseen(client: AsyncOpenAI, model: str, seed: int) -> list[UnseenSession]:
    """Asks for each call of the first session of each kind that `penstock models eval` has under that seed. Raises
    OpenAIError.

    Every call is asked for after the right history: the results that a drawn session has are those of its right calls,
    so after a wrong one of the model's own it could only go on with made-up results.
    """
    from penstock.models.judging import right_calls
    from penstock.models.served import answers
    from penstock.models.turns import documents, turns

    docs = list(documents(_KINDS, 1, seed))
    asked = [[turn for turn in turns(doc) if turn.label == "call"] for doc in docs]
    right = dict.fromkeys(_KINDS, 0)
    for turn, written in await answers(client, model, asked):
        right[turn.kind] += right_calls(turn, written)
    calls = [sum(len(turn.calls) for turn in session) for session in asked]
    return [UnseenSession(doc.kind, len(doc.tools), right[doc.kind], of) for doc, of in zip(docs, calls, strict=True)]


def account(sessions: Sequence[UnseenSession], seed: int) -> Iterator[str]:
    """A line for each session, and one for all."""
    yield "[dim]sessions that the model has never seen, each call after the right history:[/]"
    for session in sessions:
        yield f"[dim]  {session.kind:8} {session.tools} tools: {session.right} of {session.calls} calls right[/]"
    right, calls = sum(session.right for session in sessions), sum(session.calls for session in sessions)
    yield f"held-out sessions (seed {seed}): [bold]{right} of {calls}[/] calls right, name and all arguments"
