"""The decode side of drafting: one stream to the draft service, and plain decoding whenever it is not there."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import grpc
import structlog

from penstock.checkpoint import Checkpoint, CheckpointError, inspect, inspect_head, tokenizer_fingerprint
from penstock.engine.config import EngineConfig
from penstock.engine.hooks import MOST_STATES, DraftAsk, DraftStates, DraftTerms
from penstock.engine.speculation.drafting import vocabulary, vocabulary_misfit
from penstock.engine.speculation.guess import right
from penstock.rpc.channels import open_channels
from penstock.rpc.context import trace_parent
from penstock.rpc.identity import MemberIdentity
from penstock.rpc.stay import Connection, Unsuitable, stay
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import WorkerMetrics
from penstock.runtime.tasks import beside, first_of
from penstock.v1 import draft_pb2, draft_pb2_grpc
from penstock.worker.config import WorkerConfig
from penstock.worker.sampling import sampling_to_message

_LOG = structlog.get_logger("penstock.worker")
_DESCRIBE_S = 5.0
_MOST_SENT = 1 << 15
"""Tokens in one message; a longer text goes in parts."""
_MOST_AHEAD = 256
"""Drafts of one sequence that are kept: no service is asked for as many."""
_MOST_STATE_BYTES = 1 << 20
"""In one message; the last sequence's come on top."""
_MOST_TOKENS = 1 << 22
"""Of a vocabulary."""
_Call = grpc.aio.StreamStreamCall[draft_pb2.DraftNews, draft_pb2.DraftLeads]


class DraftDelay:
    """How long drafts take to come, learned: a moving average, and how far they are from it (as RFC 6298 estimates a
    round trip)."""

    def __init__(self) -> None:
        self._mean_s, self._off_s = 0.005, 0.0025
        self.each_s = 0.001
        """Between one draft and the next of a sequence that wants more."""

    def learn(self, took_s: float) -> None:
        """Drafts have come after so many seconds; one that took very long doesn't count as more than `patience_s`."""
        took_s = min(took_s, self.patience_s)
        self._off_s += 0.125 * (abs(took_s - self._mean_s) - self._off_s)
        self._mean_s += 0.125 * (took_s - self._mean_s)

    def learn_pace(self, count: int, took_s: float) -> None:
        """So many more drafts have come, so many seconds after those before them."""
        self.each_s += 0.125 * (min(took_s / count, self.patience_s) - self.each_s)

    @property
    def usual_s(self) -> float:
        """Most have come by then."""
        return self._mean_s + 2 * self._off_s

    @property
    def patience_s(self) -> float:
        """After so many seconds nobody knows when they will come."""
        return 4 * self.usual_s + 0.005


@dataclass(eq=False, slots=True)
class _Sequence:
    """What one sequence was told to be, and the drafts at hand behind that."""

    number: int
    """Its id on this stream."""
    ask: DraftAsk
    """The last."""
    length: int
    """Its tokens then."""
    sent: int = 0
    """How many of these are sent."""
    after: int = 0
    """Number of the news from which the drafts began; 0: there have been none."""
    begin: int = 0
    """Leading tokens that the drafts follow; not more than `length`."""
    wrong: bool = False
    """The text went another way: what comes for the same `after` is of no use."""
    drafts: array[int] = field(default_factory=lambda: array("I"))
    since: float | None = None
    """When it was first told of what there have been no drafts for; None: there are, or none are wanted."""
    refused: bool = False
    judged: tuple[int, int] = (0, 0)
    """Right and wrong drafts since that was asked."""
    fed: float = 0.0
    """When the last drafts came."""
    states: DraftStates | None = None
    """Those that are not sent yet."""

    def hold(self, states: DraftStates) -> None:
        """Keeps the states until they are sent; those of the last tokens, if they are many."""
        if self.states is not None and self.states.end == states.begin:
            rows = [*self.states.rows, *states.rows][-MOST_STATES:]
            states = DraftStates(states.end - len(rows), rows)
        self.states = states

    def take(self, after: int, length: int, tokens: Sequence[int]) -> None:
        """Drafts that go on from the first `length` tokens and those that came before; anything else is left out."""
        if after > self.after and length <= self.length:
            self.after, self.begin, self.wrong = after, length, False
            del self.drafts[:]
        fits = after == self.after and length == self.begin + len(self.drafts)
        if self.wrong or not fits or len(self.drafts) + len(tokens) > _MOST_AHEAD:
            return
        self.drafts.extend(tokens)
        self.refused = False
        self.settle()

    def settle(self) -> None:
        """Drops the drafts that are text by now, and all if the text is another."""
        count = min(self.length - self.begin, len(self.drafts))
        hits = right(self.drafts[:count], self.ask.tokens[self.begin : self.begin + count])
        self.judged = self.judged[0] + hits, self.judged[1] + (hits < count)
        if hits == count:
            del self.drafts[:count]
            self.begin += count
        else:
            self.wrong = True
            del self.drafts[:]

    @property
    def ready(self) -> Sequence[int]:
        """Drafts behind what was told."""
        return self.drafts if self.begin == self.length else ()


class DraftClient:
    """Drafter over gRPC. Sequences are sent as differences; drafts that come too late are dropped."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        target: Checkpoint,
        delay: DraftDelay | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        layers: Sequence[int] = (),
    ) -> None:
        """A draft whose tokens are not those of `target` is not used, nor one that guesses from other states than those
        after so many `layers`. `delay` is what it learns; `clock` gives seconds."""
        self._stub = draft_pb2_grpc.DraftStub(channel)
        self._target = target
        self._tokenizer = tokenizer_fingerprint(target)
        self._layers = tuple(layers)
        self._clock = clock
        self.connected = asyncio.Event()
        """Set while there is a stream."""
        self._sequences: dict[str, _Sequence] = {}
        self._by_number: dict[int, _Sequence] = {}
        self._unsent: dict[str, None] = {}
        """Those of which the service has not heard the latest, in order."""
        self._gone: list[int] = []
        self._traces: dict[str, str] = {}
        self._ids = itertools.count(1)
        self._news = itertools.count(1)
        self._told = asyncio.Event()
        self._came = asyncio.Event()
        self._delay = delay or DraftDelay()
        self._silent: float | None = None
        """Since when the service owes something and has said nothing; None: it owes nothing."""

    def begin(self, id: str) -> None:
        """A request is about to be decoded: the current trace is its trace. `forget` ends it."""
        self._traces[id] = trace_parent()

    # What the engine says and asks

    def tell(self, asks: Sequence[DraftAsk]) -> None:
        """Notes how far the sequences are; the stream's own task sends it."""
        now = self._clock()
        for ask in asks:
            sequence = self._sequences.get(ask.id)
            if sequence is None:
                sequence = self._sequences[ask.id] = _Sequence(next(self._ids), ask, len(ask.tokens))
                self._by_number[sequence.number] = sequence
            sequence.ask, sequence.length = ask, len(ask.tokens)
            if ask.states is not None:
                sequence.hold(ask.states)
            sequence.settle()
            self._await(sequence, now)
            self._unsent[ask.id] = None
        self._told.set()

    def _await(self, sequence: _Sequence, now: float) -> None:
        if sequence.ready or not sequence.ask.k or sequence.refused:
            sequence.since = None
            return
        if sequence.since is None:
            sequence.since = now
        if self._silent is None:
            self._silent = now

    def ahead(self, id: str, length: int) -> Sequence[int]:
        """Drafts at hand that go on from the first `length` tokens, if the sequence was told to have so many."""
        sequence = self._sequences.get(id)
        return sequence.ready if sequence is not None and sequence.length == length else ()

    def judged(self, id: str) -> tuple[int, int]:
        """Right and wrong drafts since the last call."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return 0, 0
        judged, sequence.judged = sequence.judged, (0, 0)
        return judged

    @property
    def delay_s(self) -> float:
        """Most drafts come within so many seconds."""
        return self._delay.usual_s

    def expected(self, id: str, count: int = 1) -> float:
        """Seconds by which so many drafts are there most often; inf while the service is away, says nothing, or takes
        too long, and for more than were asked for."""
        sequence = self._sequences.get(id)
        if sequence is None or count > max(sequence.ask.k, len(sequence.ready)):
            return inf
        more = count - len(sequence.ready)
        if more <= 0:
            return 0.0
        if sequence.refused or (sequence.ready and (self._layers or sequence.ready[-1] in sequence.ask.terms.stops)):
            return inf  # a head says all that it guesses at once
        now = self._clock()
        if sequence.ready:
            late = now - sequence.fed > more * self._delay.each_s + self._delay.patience_s
            return inf if late or not self.connected.is_set() else more * self._delay.each_s
        if sequence.since is None or not self.connected.is_set():
            return inf
        waited, silent = now - sequence.since, now - (now if self._silent is None else self._silent)
        if max(waited, silent) > self._delay.patience_s:
            return inf
        # what is late already may take as long again
        return abs(self._delay.usual_s - waited) + (more - 1) * self._delay.each_s

    async def arrived(self) -> None:
        """Returns when any drafts, or the news that there will be none, have come since the last call."""
        await self._came.wait()
        self._came.clear()

    def forget(self, id: str) -> None:
        """The sequence is gone; the next message tells the service."""
        self._traces.pop(id, None)
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            del self._by_number[sequence.number]
            self._unsent.pop(id, None)
            if sequence.sent:
                self._gone.append(sequence.number)
                self._told.set()

    # What the service says

    def _take(self, leads: draft_pb2.DraftLeads) -> None:
        """Takes drafts in. What does not fit is left out: the service may say anything."""
        now, first = self._clock(), 0
        self._silent = None
        tokens = array("I", leads.tokens)
        for number, after, length, count in zip(leads.ids, leads.after, leads.lengths, leads.counts, strict=False):
            own, first = tokens[first : first + count], first + count
            sequence = self._by_number.get(number)
            if sequence is None:
                continue
            hungry = sequence.after == after and 0 < len(sequence.ready) < sequence.ask.k
            before = sequence.after
            sequence.take(after, length, own)
            answer = sequence.after > before
            if sequence.since is not None and (answer or sequence.ready):
                if answer:  # what has only caught up with the text says nothing of the way there and back
                    self._delay.learn(now - sequence.since)
                sequence.since = None
            elif hungry and own:
                self._delay.learn_pace(len(own), now - sequence.fed)
            sequence.fed = now
        for number in leads.refused:
            sequence = self._by_number.get(number)
            if sequence is not None:
                sequence.refused, sequence.since = True, None
        if leads.ids or leads.refused:
            self._came.set()

    # The stream

    async def run(self) -> None:
        """Keeps the stream until cancelled. It may run again after an error: a stream begins with nothing known."""
        await stay(self._connect, peer="draft", log=_LOG)

    async def misfit(self) -> str | None:
        """Why this draft can't draft here; None when it can. Raises AioRpcError when the service can't be asked."""
        found = await self._stub.Describe(draft_pb2.DescribeRequest(), timeout=_DESCRIBE_S)
        if (layers := tuple(found.layers)) != self._layers:
            return f"guesses from {_said(layers)}, and this worker tells {_said(self._layers)}"
        hidden = self._target.config.hidden_size
        if layers and found.hidden != hidden:
            return f"guesses from states of {found.hidden} numbers, and those of the model have {hidden}"
        if found.tokenizer == self._tokenizer:
            return None
        theirs: dict[str, int] = {}
        call = self._stub.Vocabulary(draft_pb2.VocabularyRequest(), timeout=_DESCRIBE_S)
        try:
            async for part in call:
                theirs.update(zip(part.texts, part.ids, strict=False))
                if len(theirs) > _MOST_TOKENS:
                    return f"has more than {_MOST_TOKENS} tokens"
        finally:
            call.cancel()
        reason = await asyncio.to_thread(lambda: vocabulary_misfit(vocabulary(self._target), theirs))
        return None if reason is None else f"has other tokens than the model: {reason}"

    async def _connect(self, connection: Connection) -> None:
        reason = await self.misfit()
        if reason is not None:
            raise Unsuitable(f"the draft {reason}")
        call = self._stub.Propose()
        self.connected.set()
        self._tell_all()
        try:
            await first_of(self._read(call, connection), self._write(call))
        finally:
            call.cancel()
            self.connected.clear()
            self._came.set()  # who waits for drafts waits no more
            for sequence in self._sequences.values():
                sequence.sent = 0

    def _tell_all(self) -> None:
        """A new stream knows nothing of the sequences, nor of those before."""
        self._gone.clear()
        self._news, self._silent = itertools.count(1), None
        for sequence in self._sequences.values():
            sequence.sent = sequence.after = 0
            sequence.wrong = True
            sequence.since, sequence.refused = None, False
            del sequence.drafts[:]
        self._unsent = dict.fromkeys(self._sequences)
        self._told.set()

    async def _read(self, call: _Call, connection: Connection) -> None:
        """Returns when the service ended the stream; raises AioRpcError when the stream broke."""
        async for leads in call:
            connection.established = True
            self._take(leads)

    async def _write(self, call: _Call) -> None:
        """Writes what there is to tell, of each sequence the latest; never returns: the reader says when and why the
        stream ended. Only the stream's end cancels this, since gRPC ends a call whose write is cancelled."""
        try:
            while True:
                await self._told.wait()
                self._told.clear()
                while self._unsent or self._gone:
                    await call.write(self._message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.get_running_loop().create_future()

    def _message(self) -> draft_pb2.DraftNews:
        """What is not sent yet, as far as it has room in one message."""
        gone, self._gone = self._gone, []
        return draft_pb2.DraftNews(number=next(self._news), sequences=self._differences(), forget=gone)

    def _differences(self) -> Iterator[draft_pb2.DraftSequence]:
        room, state_room = _MOST_SENT, _MOST_STATE_BYTES
        while self._unsent and room and state_room > 0:
            id = next(iter(self._unsent))
            sequence = self._sequences[id]
            end = min(sequence.length, sequence.sent + room)
            room -= end - sequence.sent
            difference = self._difference(id, sequence, end)
            state_room -= len(difference.states.rows)
            yield difference
            sequence.sent = end
            if end == sequence.length:
                del self._unsent[id]

    def _difference(self, id: str, sequence: _Sequence, end: int) -> draft_pb2.DraftSequence:
        """The tokens up to `end`; drafts are wanted behind the last one only, and states come with it."""
        ask, new, states = sequence.ask, not sequence.sent, None
        if end == sequence.length:
            states, sequence.states = sequence.states, None
        return draft_pb2.DraftSequence(
            id=sequence.number,
            keep=sequence.sent,
            tokens=ask.tokens[sequence.sent : end],
            k=ask.k if end == sequence.length else 0,
            traceparent=self._traces.get(id, "") if new else "",
            terms=_terms(ask.terms) if new else None,
            states=None if states is None else _states(states),
        )


def _said(layers: Sequence[int]) -> str:
    return f"states after the layers {', '.join(map(str, layers))}" if layers else "tokens alone"


def _states(states: DraftStates) -> draft_pb2.DraftStates:
    return draft_pb2.DraftStates(begin=states.begin, rows=b"".join(states.rows))


def _terms(terms: DraftTerms) -> draft_pb2.DraftTerms:
    sampling = sampling_to_message(terms.sampling)
    return draft_pb2.DraftTerms(
        sampling=sampling,
        prompt=terms.prompt,
        ends=terms.stops,
        owner=terms.owner,
        session=terms.session.decode(),
        seal_key=terms.seal,
    )


def _layers(engine: EngineConfig, target: Checkpoint) -> Sequence[int]:
    """After how many layers the states are that are told to the service. Raises ConfigError."""
    if not engine.tells_states:
        return ()
    try:
        return inspect_head(engine.draft_head, target).layers
    except CheckpointError as error:
        raise ConfigError("draft_head", engine.draft_head, str(error)) from error


@asynccontextmanager
async def open_drafter(config: WorkerConfig, metrics: WorkerMetrics) -> AsyncIterator[DraftClient | None]:
    """A client of the configured draft service, or None. Its defects cost drafts, never the worker.

    Raises ConfigError when the service answers already and its draft has other tokens than the model, or guesses from
    other states than this worker tells; and when there are states to tell and no service.
    """
    if config.draft in ("", "none"):
        if config.engine.tells_states:
            raise ConfigError("draft", config.draft, "must be the service in which the draft head guesses")
        yield None
        return
    async with open_channels(MemberIdentity.of(config.member_tls, "worker")) as channels:
        target = inspect(config.engine.model)
        client = DraftClient(channels.to(config.draft, "draft"), target, layers=_layers(config.engine, target))
        try:
            reason = await client.misfit()
        except grpc.aio.AioRpcError:
            reason = None  # it may come later
        if reason is not None:
            raise ConfigError("draft", config.draft, reason)
        async with beside(client.run, name="draft client", on_failure="restart", failed=metrics.task_failed):
            yield client
