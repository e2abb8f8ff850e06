"""The decode side of drafting: one stream to the draft service, and plain decoding whenever it is not there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import structlog

from penstock.checkpoint import tokenizer_fingerprint
from penstock.engine.hooks import DraftAsk
from penstock.rpc.channels import open_channels
from penstock.rpc.context import trace_parent
from penstock.rpc.stay import Connection, Unsuitable, stay
from penstock.runtime.metrics import WorkerMetrics
from penstock.runtime.tasks import beside, first_of
from penstock.v1 import draft_pb2, draft_pb2_grpc
from penstock.worker.config import WorkerConfig

_LOG = structlog.get_logger("penstock.worker")
_DESCRIBE_S = 5.0
_Call = grpc.aio.StreamStreamCall[draft_pb2.DraftAsk, draft_pb2.DraftProposal]


@dataclass
class _Known:
    """How much of one sequence the service has on this stream."""

    number: int
    tokens: int = 0


class DraftClient:
    """Drafter over gRPC. Sequences are sent as differences; a proposal that comes too late is dropped."""

    def __init__(self, channel: grpc.aio.Channel, tokenizer: str) -> None:
        """`tokenizer` is the fingerprint of the target's; a draft model with another one is not used."""
        self._stub = draft_pb2_grpc.DraftStub(channel)
        self._tokenizer = tokenizer
        self._outgoing: asyncio.Queue[draft_pb2.DraftAsk] | None = None
        """One ask on its way into the stream; None: there is no stream."""
        self._known: dict[str, _Known] = {}
        self._traces: dict[str, str] = {}
        self._ids = itertools.count(1)
        self._asks = itertools.count(1)
        self._gone: list[int] = []
        self._waiting: tuple[int, asyncio.Future[draft_pb2.DraftProposal]] | None = None

    def begin(self, id: str) -> None:
        """A request is about to be decoded: the current trace is its trace. `forget` ends it."""
        self._traces[id] = trace_parent()

    async def propose(self, asks: Sequence[DraftAsk]) -> Mapping[str, Sequence[int]]:
        """An empty answer at once when the service is away or has not taken the last ask; the engine bounds the wait
        for any other. An ask whose answer is not waited for is sent all the same: later ones go on from it."""
        if self._outgoing is None or self._outgoing.full():
            return {}
        message = self._message(asks)
        answer: asyncio.Future[draft_pb2.DraftProposal] = asyncio.get_running_loop().create_future()
        self._waiting = (message.number, answer)
        self._outgoing.put_nowait(message)
        try:
            proposal = await answer
        except asyncio.InvalidStateError:
            return {}
        finally:
            self._waiting = None
        return self._answers(asks, proposal)

    def forget(self, id: str) -> None:
        """The sequence is gone; the next ask tells the service."""
        self._traces.pop(id, None)
        known = self._known.pop(id, None)
        if known is not None:
            self._gone.append(known.number)

    def _message(self, asks: Sequence[DraftAsk]) -> draft_pb2.DraftAsk:
        gone, self._gone = self._gone, []
        return draft_pb2.DraftAsk(
            number=next(self._asks), sequences=[self._difference(ask) for ask in asks], forget=gone
        )

    def _difference(self, ask: DraftAsk) -> draft_pb2.DraftSequence:
        known = self._known.get(ask.id)
        traceparent = ""
        if known is None:
            known = self._known[ask.id] = _Known(next(self._ids))
            traceparent = self._traces.get(ask.id, "")
        keep, known.tokens = known.tokens, len(ask.tokens)
        grammar = None if keep else _grammar(ask)
        return draft_pb2.DraftSequence(
            id=known.number,
            keep=keep,
            tokens=ask.tokens[keep:],
            k=ask.k,
            seed=ask.seed,
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            min_p=ask.min_p,
            traceparent=traceparent,
            grammar=grammar,
        )

    def _answers(self, asks: Sequence[DraftAsk], proposal: draft_pb2.DraftProposal) -> dict[str, Sequence[int]]:
        forgotten = set(proposal.unknown)
        tokens = {sequence.id: sequence.tokens for sequence in proposal.sequences}
        answers: dict[str, Sequence[int]] = {}
        for ask in asks:
            known = self._known.get(ask.id)
            if known is None:
                continue
            if known.number in forgotten:
                known.tokens = 0
            elif known.number in tokens:
                answers[ask.id] = tokens[known.number]
        return answers

    async def run(self) -> None:
        """Keeps the stream until cancelled. It may run again after an error: a stream begins with nothing known."""
        await stay(self._connect, peer="draft", log=_LOG)

    async def _connect(self, connection: Connection) -> None:
        found = await self._stub.Describe(draft_pb2.DescribeRequest(), timeout=_DESCRIBE_S)
        if found.tokenizer not in ("", self._tokenizer):
            raise Unsuitable(f"the draft model has another tokenizer, {found.tokenizer}, not {self._tokenizer}")
        call = self._stub.Propose()
        self._outgoing = asyncio.Queue(1)
        try:
            await first_of(self._read(call, connection), _write(call, self._outgoing))
        finally:
            call.cancel()
            self._lost()

    async def _read(self, call: _Call, connection: Connection) -> None:
        """Returns when the service ended the stream; raises AioRpcError when the stream broke."""
        async for proposal in call:
            connection.established = True
            self._came(proposal)

    def _came(self, proposal: draft_pb2.DraftProposal) -> None:
        if self._waiting is not None and self._waiting[0] == proposal.number and not self._waiting[1].done():
            self._waiting[1].set_result(proposal)

    def _lost(self) -> None:
        self._outgoing = None
        self._known.clear()
        self._gone.clear()
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(asyncio.InvalidStateError("the draft stream ended"))


async def _write(call: _Call, outgoing: asyncio.Queue[draft_pb2.DraftAsk]) -> None:
    """Writes what there is; never returns: the reader says when and why the stream ended. Only the stream's end cancels
    this, since gRPC ends a call whose write is cancelled."""
    try:
        while True:
            await call.write(await outgoing.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await asyncio.get_running_loop().create_future()


def _grammar(ask: DraftAsk) -> draft_pb2.DraftGrammar | None:
    own = ask.grammar
    return None if own is None else draft_pb2.DraftGrammar(text=own.text, prompt=own.prompt, ends=own.ends)


@asynccontextmanager
async def open_drafter(config: WorkerConfig, metrics: WorkerMetrics) -> AsyncIterator[DraftClient | None]:
    """A client of the configured draft service, or None. Its defects cost drafts, never the worker."""
    if config.draft in ("", "none"):
        yield None
        return
    async with open_channels() as channels:
        client = DraftClient(channels.to(config.draft), tokenizer_fingerprint(config.engine.model))
        async with beside(client.run, name="draft client", on_failure="restart", failed=metrics.task_failed):
            yield client
