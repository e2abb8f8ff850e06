"""Guesses from the texts of a sequence, of its session and of its tenant."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.speculation.guess import Guess
from penstock.engine.speculation.lookup.bodies import Body, Chained
from penstock.engine.speculation.lookup.chances import LONGEST
from penstock.engine.speculation.lookup.corpus import Corpora

_ANSWER_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """How much is remembered. A token takes 24 bytes, and a session or tenant 22 to 650 kB besides."""

    tokens: int = 1 << 21
    """Of all sessions and tenants together, those apart that are just being taken in."""
    session_tokens: int = 1 << 18
    """The last ones of one session, prompts included. A power of two from 512 on."""
    tenant_tokens: int = 1 << 18
    """The last ones of one tenant's outputs. A power of two from 512 on."""
    sessions: int = 256
    """Of all tenants together."""
    tenants: int = 64

    def __post_init__(self) -> None:
        for limit in (self.session_tokens, self.tenant_tokens):
            if limit < 512 or limit & (limit - 1):
                raise ValueError(f"{limit} is no power of two from 512 on")


@dataclass(slots=True)
class _Memory:
    """What is remembered of one tenant."""

    outputs: Body
    sessions: OrderedDict[bytes, Body] = field(default_factory=OrderedDict)
    """Their prompts and outputs; the first was used least recently."""

    @property
    def held(self) -> int:
        return self.outputs.held + sum(session.held for session in self.sessions.values())


@dataclass(slots=True)
class _Speaker:
    """A running sequence."""

    own: Any
    """The corpus of its output, with the last tokens of the prompt in front."""
    answer: array[int]
    """The same tokens."""
    output: int
    """How many of them are output."""
    session: Body
    """Has its prompt. Its own, if it has no session."""
    outputs: Body | None
    """Of its tenant."""
    prompt: Chained = field(default_factory=Chained)


class Lookup:
    """Proposes what followed the last tokens where they stood before: in the sequence's own text, in prompts and
    outputs of its session, and in outputs of its tenant. Nobody learns from another tenant's texts.

    All methods belong to one thread, an event loop's. With an `executor`, which must have a single thread, texts are
    taken in there, and until then guesses are made without them. Without one, `begin` and `end` take them in.
    """

    def __init__(self, limits: LookupLimits, corpora: Corpora, executor: Executor | None = None) -> None:
        self._limits = limits
        self._corpora = corpora
        self._executor = executor
        self.defects = 0
        """Texts that could not be taken in."""
        self._speakers: dict[int, _Speaker] = {}
        self._memories: OrderedDict[bytes, _Memory] = OrderedDict()
        """By tenant; the first was used least recently."""

    @property
    def held(self) -> int:
        """Tokens of all sessions and tenants."""
        return sum(memory.held for memory in self._memories.values())

    def begin(self, key: int, tokens: Sequence[int], prompt: int, tenant: bytes, session: bytes) -> None:
        """A sequence runs, until `end`: so many of its tokens are the prompt, the others are output. Where `tenant` is
        empty it learns from itself alone, and nobody learns from it."""
        given, answer = tokens[:prompt], array("i", tokens[max(0, prompt - LONGEST) :])
        own = self._corpora.new(_ANSWER_TOKENS)
        own.append(answer)
        body, outputs = self._bodies(tenant, session)
        self._speakers[key] = speaker = _Speaker(own, answer, len(tokens) - prompt, body, outputs)
        body.do(lambda: body.take_in(given, speaker.prompt))
        self._forget()

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """Output of a sequence, in order."""
        speaker, added = self._speakers[key], array("i", tokens)
        speaker.own.append(added)
        speaker.answer += added
        speaker.output += len(added)

    def propose(self, key: int, most: int, after: Sequence[int] = ()) -> Guess:
        """What would come behind the sequence and then `after`: at most `most` tokens."""
        speaker = self._speakers[key]
        outputs = speaker.outputs and speaker.outputs.readable
        return self._corpora.guess(speaker.own, (speaker.session.readable, outputs), after, most)

    def end(self, key: int) -> None:
        """A sequence runs no more. Its session and its tenant remember its output."""
        speaker = self._speakers.pop(key)
        session, outputs = speaker.session, speaker.outputs
        if outputs is not None and speaker.output:
            session.do(lambda: session.take_on(speaker.answer, speaker.output, speaker.prompt))
            outputs.do(lambda: outputs.append(speaker.answer))
            self._forget()

    def _bodies(self, tenant: bytes, session: bytes) -> tuple[Body, Body | None]:
        """A session's, and that of its tenant's outputs; both were used now."""
        limits, memories = self._limits, self._memories
        if not tenant:
            return self._body(limits.session_tokens), None
        if tenant not in memories:
            memories[tenant] = _Memory(self._body(limits.tenant_tokens))
        memories.move_to_end(tenant)
        memory = memories[tenant]
        if not session:
            return self._body(limits.session_tokens), memory.outputs
        if session not in memory.sessions:
            memory.sessions[session] = self._body(limits.session_tokens)
        memory.sessions.move_to_end(session)
        return memory.sessions[session], memory.outputs

    def _body(self, limit: int) -> Body:
        return Body(self._corpora, limit, self._executor, self._failed)

    def _failed(self) -> None:
        self.defects += 1

    def _forget(self) -> None:
        """Keeps to the limits. Running sequences keep what they have."""
        memories, limits = self._memories, self._limits
        while len(memories) > limits.tenants:
            memories.popitem(last=False)
        while sum(len(memory.sessions) for memory in memories.values()) > limits.sessions:
            max(memories.values(), key=lambda memory: len(memory.sessions)).sessions.popitem(last=False)
        while self.held > limits.tokens:
            # Of the tenant that has most, so that no flood of one pushes out what others have.
            tenant = max(memories, key=lambda name: memories[name].held)
            if memories[tenant].sessions:
                memories[tenant].sessions.popitem(last=False)
            else:
                del memories[tenant]
