"""The assistant turns of held-out documents: as a text to go on from, as what a client asks, and what is right.

Torch is not needed here, nor by anything that this imports.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tokenizers import Tokenizer

from .render import Document, unmarked
from .session import Message
from .sessions import make
from .tokenizer import ids_and_starts
from .words import Side

CONTEXT = 4096
"""Turns that end within so many tokens are counted."""
Calls = list[tuple[str, str]]
"""Calls as (name, canonical arguments)."""
_TURN = "<|im_start|>assistant\n"
_OURS = ("label", "retold", "schema")
"""What messages of the generator have beside OpenAI's fields."""


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    """An assistant turn of a document: what stands before it, what should come, and what kind of turn it is."""

    begin: int  # of the turn, in the document's text
    expected: str
    label: str  # call, answer, json, chat
    kind: str  # of the document
    values: tuple[str, ...]  # what the answer must contain
    messages: Sequence[Message]  # the right ones before it, in OpenAI's form
    tools: Sequence[Mapping[str, Any]]
    schema: Mapping[str, Any] | None  # of a JSON answer

    @property
    def calls(self) -> Calls:
        """The right ones."""
        return calls_in(self.expected) or []


def documents(kinds: Sequence[str], count: int, seed: int) -> Iterator[Document]:
    """`count` held-out documents of each kind."""
    side = Side(evaluation=True)
    for kind in kinds:
        for i in range(count):
            doc = make(kind, Random(f"evaluation:{seed}:{kind}:{i}"), side)
            doc.kind = kind
            yield doc


def turns(doc: Document) -> Iterator[AssistantTurn]:
    """The assistant turns of a chat document, but for calls as a client has written them."""
    places = [place for place, message in enumerate(doc.messages) if message["role"] == "assistant"]
    for place, match in zip(places, re.finditer(re.escape(_TURN), doc.text), strict=True):
        begin = match.end()
        end = doc.text.index("<|im_end|>", begin)
        inside = [(a, b, label) for a, b, label in doc.labels if begin <= a and b <= end]
        labels = {label for *_, label in inside}
        if not labels:
            continue
        yield AssistantTurn(
            begin=begin,
            expected=doc.text[begin:end],
            label=next((w for w in ("call", "json", "chat", "answer") if w in labels), "answer"),
            kind=doc.kind,
            values=tuple(doc.text[a:b] for a, b, label in inside if label == "value"),
            messages=[_sent(message) for message in doc.messages[:place]],
            tools=doc.tools,
            schema=doc.messages[place].get("schema"),
        )


def fitting(
    tokenizer: Tokenizer, doc: Document, context: int
) -> Iterator[tuple[AssistantTurn, Sequence[int], Sequence[int]]]:
    """The turns that end within `context` tokens, each with the tokens before it and its own, end marker included."""
    ids, starts = ids_and_starts(tokenizer, doc.text)
    for turn in turns(doc):
        first = bisect_left(starts, turn.begin)
        last = first + len(tokenizer.encode(turn.expected).ids) + 1
        if last > min(len(ids), context):
            return
        yield turn, ids[:first], ids[first:last]


def calls_in(text: str) -> Calls | None:
    """The calls of a turn; None where one does not parse."""
    out = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(body)
            out.append((call["name"], canonical(call["arguments"])))
        except (ValueError, KeyError, TypeError):
            return None
    return out


def canonical(arguments: Any) -> str:
    """Arguments as text that is the same for equal ones."""
    return json.dumps(arguments, sort_keys=True)


def _sent(message: Mapping[str, Any]) -> Message:
    """A message as a client sends it."""
    sent = {key: item for key, item in message.items() if key not in _OURS}
    if isinstance(content := sent["content"], str):
        sent["content"] = unmarked(content)
    return sent
