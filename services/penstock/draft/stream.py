"""The sequences of one decode worker: what it says of them, and the guesses on their way to it."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
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
_MOST_REFUSED = 1 << 16
"""Sequences without drafts; a worker has fewer at a time."""


@dataclass(slots=True)
class _Outgoing:
    """Guesses that are not sent yet."""

    after: int
    length: int
    tokens: array[int] = field(default_factory=lambda: array("I"))


@dataclass(slots=True)
class _Known:
    """What is remembered of a sequence."""

    owner: bytes
    letters: int
    """Of its terms."""
    span: Span | None
    length: int = 0
    """Its tokens."""

    @property
    def size(self) -> int:
        """A letter of the terms counts as a token."""
        return self.length + self.letters


class DraftStream:
    """One decode worker's sequences, within the bounds of `config`. A sequence whose terms nobody would sample by gets
    no drafts, and neither does the youngest of the owner that has most, where there is no room for all. What breaks the
    protocol ends the stream."""

    def __init__(self, name: int, drafts: Drafts, config: DraftConfig) -> None:
        self._name = name
        self._drafts = drafts
        self._most_sequences = config.max_stream_sequences
        self._most_tokens = config.max_stream_tokens
        self._known: dict[int, _Known] = {}
        """The oldest first."""
        self._sizes: Counter[bytes] = Counter()
        """Tokens of each owner."""
        self._counts: Counter[bytes] = Counter()
        """Sequences of each owner."""
        self._held = 0
        """Tokens of all sequences."""
        self._without: set[int] = set()
        """Sequences that get no drafts; what is said of them is left out, until they are forgotten."""
        self._number = 0
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
            told = [self._told(sequence) for sequence in message.sequences if sequence.id not in self._without]
            await self._drafts.tell([each for each in told if each is not None and each.id[1] in self._known])

    def _told(self, sequence: draft_pb2.DraftSequence) -> DraftTold | None:
        """None when the sequence gets no drafts."""
        known, terms = self._known.get(sequence.id), None
        had = 0 if known is None else known.length
        if sequence.keep > had:
            raise bad("keep", str(sequence.keep), f"sequence {sequence.id} has {had} tokens here")
        if not sequence.keep + len(sequence.tokens):
            raise bad("tokens", "[]", f"sequence {sequence.id} needs one at least")
        states = self._states(sequence) if sequence.HasField("states") else None
        if known is None:
            try:
                terms = _terms(sequence.terms)
            except InvalidRequest:  # of this sequence alone, and it may be its client's fault
                self._leave_out(sequence.id)
                return None
            known = self._hold(sequence, terms)
        self._grow(known, sequence.keep + len(sequence.tokens) - known.length)
        self._fit()
        return DraftTold(
            id=(self._name, sequence.id),
            number=self._number,
            keep=sequence.keep,
            tokens=list(sequence.tokens),
            k=min(sequence.k, _MAX_K),
            terms=terms,
            states=states,
        )

    def _hold(self, sequence: draft_pb2.DraftSequence, terms: DraftTerms) -> _Known:
        span = _span(sequence.traceparent) if sequence.traceparent else None
        known = self._known[sequence.id] = _Known(terms.owner, _letters(terms), span)
        self._counts[known.owner] += 1
        self._sizes[known.owner] += known.size
        self._held += known.size
        return known

    def _grow(self, known: _Known, change: int) -> None:
        known.length += change
        self._sizes[known.owner] += change
        self._held += change

    def _fit(self) -> None:
        """Leaves out the youngest sequences of the owners that have most, until the others have room."""
        while (many := len(self._known) > self._most_sequences) or self._held > self._most_tokens:
            taken = self._counts if many else self._sizes
            most = max(taken, key=taken.__getitem__)
            youngest = next(id for id in reversed(self._known) if self._known[id].owner == most)
            self._drop(youngest)
            self._leave_out(youngest)

    def _leave_out(self, id: int) -> None:
        if len(self._without) >= _MOST_REFUSED:
            right = f"a stream may have {_MOST_REFUSED} that get no drafts"
            raise InvalidRequest(f"sequences: {right}", field="sequences")
        self._without.add(id)
        self._refused.add(id)
        self._news.set()

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

    def _drop(self, id: int) -> None:
        self._without.discard(id)
        self._refused.discard(id)
        if id in self._known:
            self._drafts.forget([self._release(id)])

    def _release(self, id: int) -> SequenceId:
        known = self._known.pop(id)
        self._held -= known.size
        self._sizes[known.owner] -= known.size
        self._counts[known.owner] -= 1
        if not self._counts[known.owner]:
            del self._counts[known.owner], self._sizes[known.owner]
        self._leads.pop(id, None)
        self._refused.discard(id)
        if known.span is not None:
            known.span.end()
        return self._name, id

    # What is guessed

    def take(self, leads: Sequence[DraftLead], refused: Sequence[SequenceId]) -> None:
        """Guesses to send. A reader that is slow gets those of several steps at once."""
        for _, id in refused:
            if id in self._known:
                self._refused.add(id)
        for lead in leads:
            id = lead.id[1]
            if id not in self._known:
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
        self._drafts.detach(self._name, [self._release(id) for id in list(self._known)])


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
