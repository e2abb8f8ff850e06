"""The sequences of one decode worker: what it says of them, and the guesses on their way to it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Drafts
from penstock.engine.checks import check_sampling
from penstock.engine.errors import RequestRefused
from penstock.engine.hooks import MOST_STATES, DraftStates, DraftTerms
from penstock.engine.speculation.leads import DraftLead, DraftTold, SequenceId
from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_namespace
from penstock.kv.sealing import SEAL_KEY_BYTES
from penstock.rpc.bounds import bad, check_length, check_session
from penstock.rpc.context import read_trace
from penstock.v1 import draft_pb2
from penstock.worker.sampling import sampling_from_message

_MAX_K = 128
_MOST_IDS = 1 << 32
"""What is no token of the draft model is left out later."""


@dataclass(slots=True)
class _Outgoing:
    """Guesses that are not sent yet."""

    after: int
    length: int
    tokens: array[int] = field(default_factory=lambda: array("I"))


class DraftStream:
    """One decode worker's sequences, within the bounds of `config`."""

    def __init__(self, name: int, drafts: Drafts, config: DraftConfig) -> None:
        self._name = name
        self._drafts = drafts
        self._most_sequences = config.max_stream_sequences
        self._most_tokens = config.max_stream_tokens
        self._lengths: dict[int, int] = {}
        """Tokens of each sequence."""
        self._terms: dict[int, int] = {}
        """Letters of the terms of each."""
        self._held = 0
        """Tokens of all sequences. A letter of their terms counts as one."""
        self._number = 0
        self._spans: dict[int, Span] = {}
        self._leads: dict[int, _Outgoing] = {}
        self._refused: set[int] = set()
        self._news = asyncio.Event()
        self._over = False
        self._error: BaseException | None = None
        drafts.attach(name, self)

    # What the worker says

    async def read(self, requests: AsyncIterator[draft_pb2.DraftNews]) -> None:
        """Takes news in until there will be no more. Raises InvalidRequest when they do not fit."""
        async for message in requests:
            if message.number <= self._number:
                raise bad("number", str(message.number), f"must be more than that before, {self._number}")
            self._number = message.number
            for id in message.forget:
                self._drop(id)
            await self._drafts.tell([self._told(sequence) for sequence in message.sequences])

    def _told(self, sequence: draft_pb2.DraftSequence) -> DraftTold:
        known, new = self._lengths.get(sequence.id, 0), sequence.id not in self._lengths
        if sequence.keep > known:
            raise bad("keep", str(sequence.keep), f"sequence {sequence.id} has {known} tokens here")
        if not sequence.keep + len(sequence.tokens):
            raise bad("tokens", "[]", f"sequence {sequence.id} needs one at least")
        terms = _terms(sequence.terms) if new else None
        letters = _letters(terms) if terms else 0
        self._check(new, sequence.keep + len(sequence.tokens) - known + letters)
        if new:
            self._terms[sequence.id] = letters
            if sequence.traceparent:
                self._spans[sequence.id] = _span(sequence.traceparent)
        self._held += sequence.keep + len(sequence.tokens) - known + letters
        self._lengths[sequence.id] = sequence.keep + len(sequence.tokens)
        return DraftTold(
            id=(self._name, sequence.id),
            number=self._number,
            keep=sequence.keep,
            tokens=list(sequence.tokens),
            k=min(sequence.k, _MAX_K),
            terms=terms,
            states=self._states(sequence) if sequence.HasField("states") else None,
        )

    def _states(self, sequence: draft_pb2.DraftSequence) -> DraftStates:
        """Raises InvalidRequest for what can't be states of the sequence's tokens."""
        begin, rows, size = sequence.states.begin, sequence.states.rows, self._drafts.description.state_bytes
        if not size:
            raise bad("states", f"{len(rows)} bytes", "this draft guesses from tokens alone")
        count, rest = divmod(len(rows), size)
        length = sequence.keep + len(sequence.tokens)
        if rest or not count or begin + count > length or count > MOST_STATES:
            right = f"must be {size} bytes for each of 1 to {MOST_STATES} of the {length} tokens"
            raise bad("states", f"{len(rows)} bytes from token {begin} on", right)
        self._drafts.metrics.state_bytes.inc(len(rows))
        return DraftStates(begin, [rows[at : at + size] for at in range(0, len(rows), size)])

    def _check(self, new: bool, change: int) -> None:
        """Raises InvalidRequest when the stream may not hold so much more."""
        if new and len(self._lengths) >= self._most_sequences:
            right = f"a stream may have {self._most_sequences} at a time"
            raise InvalidRequest(f"sequences: {right}", field="sequences")
        if self._held + change > self._most_tokens:
            right = f"the sequences of a stream may have {self._most_tokens} together"
            raise InvalidRequest(f"tokens: {right}", field="tokens")

    def _drop(self, id: int) -> None:
        if id in self._lengths:
            self._drafts.forget([self._release(id)])

    def _release(self, id: int) -> SequenceId:
        self._held -= self._lengths.pop(id) + self._terms.pop(id)
        self._leads.pop(id, None)
        self._refused.discard(id)
        span = self._spans.pop(id, None)
        if span is not None:
            span.end()
        return self._name, id

    # What is guessed

    def take(self, leads: Sequence[DraftLead], refused: Sequence[SequenceId]) -> None:
        """Guesses to send. A reader that is slow gets those of several steps at once."""
        for _, id in refused:
            if id in self._lengths:
                self._refused.add(id)
        for lead in leads:
            id = lead.id[1]
            if id not in self._lengths:
                continue
            out = self._leads.get(id)
            if out is None or out.after != lead.after:
                out = self._leads[id] = _Outgoing(lead.after, lead.length)
            out.tokens.extend(lead.tokens)
            self._refused.discard(id)
        self._news.set()

    async def messages(self) -> AsyncIterator[draft_pb2.DraftLeads]:
        """What there is to send, until the stream is over. Raises why it is, if something went wrong."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            if self._over:
                return
            if self._leads or self._refused:
                yield self._message()

    def _message(self) -> draft_pb2.DraftLeads:
        leads, self._leads = self._leads, {}
        refused, self._refused = self._refused, set()
        tokens = array("I")
        for lead in leads.values():
            tokens.extend(lead.tokens)
        return draft_pb2.DraftLeads(
            ids=leads,
            after=[lead.after for lead in leads.values()],
            lengths=[lead.length for lead in leads.values()],
            counts=[len(lead.tokens) for lead in leads.values()],
            tokens=tokens,
            refused=refused,
        )

    def end(self, error: BaseException | None = None) -> None:
        """No more is read, because of the error if there is one."""
        self._over, self._error = True, error
        self._news.set()

    def close(self) -> None:
        """Forgets everything."""
        self._drafts.detach(self._name, [self._release(id) for id in list(self._lengths)])


def _terms(message: draft_pb2.DraftTerms) -> DraftTerms:
    """Raises InvalidRequest for what no worker would sample by."""
    sampling = sampling_from_message(message.sampling)
    try:
        check_sampling(sampling, _MOST_IDS)
    except RequestRefused as error:
        raise InvalidRequest(str(error), field=error.field) from error
    check_namespace("owner", message.owner)
    check_session("session", message.session)
    check_length("seal_key", message.seal_key, 0, SEAL_KEY_BYTES)
    session, seal = message.session.encode(), message.seal_key
    return DraftTerms(sampling, message.prompt, frozenset(message.ends), message.owner, session, seal)


def _letters(terms: DraftTerms) -> int:
    """Letters, and ids of tokens, in the terms."""
    sampling = terms.sampling
    ids = len(terms.stops) + len(sampling.logit_bias) + len(sampling.banned_token_ids) + len(sampling.stop_token_ids)
    return len(sampling.grammar) + sum(map(len, sampling.bad_words)) + ids


def _span(traceparent: str) -> Span:
    """One sequence's time in this service, as a part of its request's trace."""
    parent = read_trace([("traceparent", traceparent)])
    return trace.get_tracer("penstock").start_span("Draft/Sequence", parent, SpanKind.SERVER)
