"""The Draft servicer: keeps each stream's sequences and asks the proposer for the newest of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from penstock.checkpoint import CheckpointError, tokenizer_fingerprint
from penstock.draft.config import DraftConfig
from penstock.engine.hooks import DraftAsk
from penstock.engine.speculation.drafting import NgramProposer, Proposer
from penstock.errors import InvalidRequest
from penstock.rpc.context import read_trace
from penstock.rpc.server import serve
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import DraftMetrics
from penstock.v1 import draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name
_MAX_TOKENS = 1 << 20
_MAX_K = 64


@dataclass(frozen=True)
class Description:
    """What a proposer is."""

    proposer: str
    tokenizer: str = ""
    vocab_size: int = 0


class Drafts:
    """One proposer and the thread it works in, shared by all streams."""

    def __init__(self, proposer: Proposer, description: Description, thread: ThreadPoolExecutor | None = None) -> None:
        self._proposer = proposer
        self._thread = thread or ThreadPoolExecutor(1, "propose")
        self.description = description
        self.metrics = DraftMetrics()

    async def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """At most k tokens for each ask."""
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._thread, self._proposer.propose, asks)
        self.metrics.proposals.inc(len(asks))
        self.metrics.tokens.inc(sum(map(len, answers)))
        return answers

    def forget(self, id: str) -> None:
        """The sequence is gone; in the proposer's own thread."""
        self._thread.submit(self._proposer.forget, id)

    def close(self) -> None:
        """Waits for the call in progress."""
        self._thread.shutdown()


class Stream:
    """The sequences that one decode worker has told of."""

    def __init__(self, name: int, forget: Callable[[str], None]) -> None:
        self._name = name
        self._forget = forget
        self._tokens: dict[int, list[int]] = {}
        self._spans: dict[int, Span] = {}

    def apply(self, message: draft_pb2.DraftAsk) -> None:
        """Takes in the differences. Raises InvalidRequest when they do not fit."""
        for id in message.forget:
            self._drop(id)
        for sequence in message.sequences:
            known = self._tokens.get(sequence.id, [])
            if sequence.keep > len(known):
                self._drop(sequence.id)
                continue
            if sequence.keep + len(sequence.tokens) > _MAX_TOKENS:
                raise InvalidRequest(f"a sequence has more than {_MAX_TOKENS} tokens", field="tokens")
            if sequence.traceparent and sequence.id not in self._spans:
                self._spans[sequence.id] = _span(sequence.traceparent)
            del known[sequence.keep :]
            known.extend(sequence.tokens)
            self._tokens[sequence.id] = known

    def asks(self, message: draft_pb2.DraftAsk) -> list[tuple[int, DraftAsk]]:
        """What to propose for, without the sequences that are unknown here."""
        return [(sequence.id, self._ask(sequence)) for sequence in message.sequences if self._tokens.get(sequence.id)]

    def unknown(self, message: draft_pb2.DraftAsk) -> list[int]:
        """Sequences that have to be sent whole."""
        return [sequence.id for sequence in message.sequences if sequence.id not in self._tokens]

    def close(self) -> None:
        """Forgets everything."""
        for id in list(self._tokens):
            self._drop(id)

    def _ask(self, sequence: draft_pb2.DraftSequence) -> DraftAsk:
        return DraftAsk(
            id=f"{self._name}/{sequence.id}",
            tokens=self._tokens[sequence.id],
            k=min(sequence.k, _MAX_K),
            seed=sequence.seed,
            temperature=sequence.temperature,
            top_k=sequence.top_k,
            top_p=sequence.top_p,
            min_p=sequence.min_p,
        )

    def _drop(self, id: int) -> None:
        if self._tokens.pop(id, None) is not None:
            self._forget(f"{self._name}/{id}")
        span = self._spans.pop(id, None)
        if span is not None:
            span.end()


def _span(traceparent: str) -> Span:
    """One sequence's time in this service, as a part of its request's trace."""
    parent = read_trace([("traceparent", traceparent)])
    return trace.get_tracer("penstock").start_span("Draft/Sequence", parent, SpanKind.SERVER)


class DraftService(draft_pb2_grpc.DraftServicer):
    """Many streams, one proposer."""

    def __init__(self, drafts: Drafts) -> None:
        self._drafts = drafts
        self._names = itertools.count(1)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftAsk],
        context: grpc.aio.ServicerContext[draft_pb2.DraftAsk, draft_pb2.DraftProposal],
    ) -> AsyncIterator[draft_pb2.DraftProposal]:
        """Answers every ask in order; one that was overtaken while it waited gets an empty answer."""
        stream = Stream(next(self._names), self._drafts.forget)
        try:
            async with aclosing(_batched(request_iterator)) as backlogs:
                async for backlog in backlogs:
                    for message in backlog:
                        stream.apply(message)
                        if message is not backlog[-1]:
                            yield draft_pb2.DraftProposal(number=message.number, unknown=stream.unknown(message))
                    yield await self._answer(stream, backlog[-1])
        finally:
            stream.close()

    async def _answer(self, stream: Stream, message: draft_pb2.DraftAsk) -> draft_pb2.DraftProposal:
        asks = stream.asks(message)
        answers = await self._drafts.propose([ask for _, ask in asks]) if asks else []
        return draft_pb2.DraftProposal(
            number=message.number,
            sequences=[
                draft_pb2.DraftTokens(id=id, tokens=tokens)
                for (id, _), tokens in zip(asks, answers, strict=True)
                if tokens
            ],
            unknown=stream.unknown(message),
        )

    async def Describe(
        self,
        request: draft_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[draft_pb2.DescribeRequest, draft_pb2.DescribeResponse],
    ) -> draft_pb2.DescribeResponse:
        """What proposes here."""
        found = self._drafts.description
        return draft_pb2.DescribeResponse(
            proposer=found.proposer, tokenizer=found.tokenizer, vocab_size=found.vocab_size
        )


async def _batched(requests: AsyncIterator[draft_pb2.DraftAsk]) -> AsyncGenerator[list[draft_pb2.DraftAsk], None]:
    """All asks that have come since the last batch; a worker that asks faster than it is answered is merged."""
    backlog: list[draft_pb2.DraftAsk] = []
    came = asyncio.Event()

    async def read() -> None:
        async for request in requests:
            backlog.append(request)
            came.set()

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(read())
        reader.add_done_callback(lambda _: came.set())
        try:
            while not reader.done() or backlog:
                await came.wait()
                came.clear()
                taken, backlog = backlog, []
                if taken:
                    yield taken
        finally:
            reader.cancel()


def _load(config: DraftConfig) -> Drafts:
    """Without torch when the proposer needs none. Raises ConfigError for a directory that is no model."""
    if config.model == "ngram":
        return Drafts(NgramProposer(), Description("ngram"))
    import torch

    from penstock.engine.speculation.draft_model import ModelProposer

    torch.set_num_threads(config.threads)  # this thread loads, and decides how many compute
    try:
        proposer = ModelProposer(Path(config.model), dtype=config.dtype, max_sequences=config.max_sequences)
    except CheckpointError as error:
        raise ConfigError("model", config.model, str(error)) from error
    checkpoint = proposer.checkpoint
    description = Description("model", tokenizer_fingerprint(checkpoint), checkpoint.config.vocab_size)
    return Drafts(proposer, description, ThreadPoolExecutor(1, "propose", torch.set_num_threads, (config.threads,)))


@dataclass(frozen=True)
class ServedDraft:
    """A draft service that serves."""

    address: str
    metrics: DraftMetrics


@asynccontextmanager
async def open_draft(config: DraftConfig) -> AsyncIterator[ServedDraft]:
    """Serves proposals until the block ends."""
    drafts = await asyncio.to_thread(_load, config)

    def register(server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServicer_to_server(DraftService(drafts), server)

    try:
        async with serve(config.address, register, [SERVICE], max_calls=config.max_streams, grace=0.2) as server:
            await server.set_serving(True)
            yield ServedDraft(f"{config.address.rsplit(':', 1)[0]}:{server.port}", drafts.metrics)
    finally:
        drafts.close()
