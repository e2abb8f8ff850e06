"""The draft service on a real socket: readers that leave, workers that ask too fast, and too much."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
from structlog.testing import capture_logs

from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Description, Drafts
from penstock.draft.service import SERVICE, DraftService
from penstock.rpc.server import serve
from penstock.v1 import draft_pb2, draft_pb2_grpc


class Slow:
    """Proposes the last token again, once the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.asked = threading.Event()
        self.forgotten = []
        self.calls = 0

    def propose(self, asks):
        self.calls += 1
        self.asked.set()
        self.gate.wait(30)
        return [[ask.tokens[-1]] * ask.k for ask in asks]

    def forget(self, id):
        self.forgotten.append(id)


@asynccontextmanager
async def drafting(proposer, **settings):
    """A service: its stub, its drafts and its server."""
    drafts = Drafts(proposer, Description("test"))
    service = DraftService(drafts, DraftConfig(model="ngram", **settings))
    add = draft_pb2_grpc.add_DraftServicer_to_server
    try:
        async with serve("127.0.0.1:0", lambda server: add(service, server), [SERVICE], grace=5) as server:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield draft_pb2_grpc.DraftStub(channel), drafts, server
    finally:
        proposer.gate.set()
        drafts.close()


def message(number, *sequences):
    return draft_pb2.DraftAsk(
        number=number,
        sequences=[draft_pb2.DraftSequence(id=id, keep=keep, tokens=tokens, k=2) for id, keep, tokens in sequences],
    )


async def idle(server):
    async with asyncio.timeout(10):
        await server.in_flight.idle()


@pytest.mark.parametrize("when", ["while it is answered", "after its answer"])
async def test_a_reader_that_leaves_leaves_nothing_in_the_log(when, caplog):
    proposer = Slow()
    with capture_logs() as lines, caplog.at_level(logging.WARNING):
        async with drafting(proposer) as (stub, drafts, server):
            call = stub.Propose()
            await call.write(message(1, (7, 0, [1, 2, 3])))
            await asyncio.to_thread(proposer.asked.wait, 10)
            if when == "after its answer":
                proposer.gate.set()
                assert (await call.read()).number == 1
            call.cancel()
            await idle(server)
            text = drafts.metrics.text().decode()
        assert "penstock_task_failures_total{" not in text
    assert proposer.forgotten == ["1/7"], "and nothing in the proposer"
    assert [line for line in lines if line["log_level"] not in ("debug", "info")] == []
    assert caplog.records == []


async def test_a_reader_that_takes_no_answers_leaves_nothing_in_the_log(caplog):
    """Answers are written until the connection takes no more: the handler is cancelled in the middle of one."""
    proposer = Slow()
    proposer.gate.set()
    with capture_logs() as lines, caplog.at_level(logging.WARNING):
        async with drafting(proposer) as (stub, _, server):
            call = stub.Propose()
            for number in range(100):
                await call.write(message(number, *((id, number, [number]) for id in range(50))))
            await asyncio.to_thread(proposer.asked.wait, 10)
            call.cancel()
            await idle(server)
    assert len(proposer.forgotten) == 50
    assert [line for line in lines if line["log_level"] not in ("debug", "info")] == []
    assert caplog.records == []


async def test_a_worker_that_asks_too_fast_gets_every_answer_in_order():
    proposer, count = Slow(), 200
    async with drafting(proposer) as (stub, _, _):
        call = stub.Propose()

        async def write():
            for number in range(count):
                await call.write(message(number, (1, number, [number])))
            await call.done_writing()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            await asyncio.to_thread(proposer.asked.wait, 10)
            proposer.gate.set()
            async with asyncio.timeout(20):
                answers = [answer async for answer in call]
    assert [answer.number for answer in answers] == list(range(count))
    assert list(answers[-1].sequences[0].tokens) == [count - 1] * 2
    assert not any(answer.unknown for answer in answers)
    assert proposer.calls < count, "asks that were overtaken are not proposed for"


async def test_too_much_ends_the_stream_and_names_the_field():
    proposer = Slow()
    proposer.gate.set()
    async with drafting(proposer, max_stream_sequences=2, max_stream_tokens=10) as (stub, _, server):
        for field, ids, tokens in (("sequences", (1, 2, 3), [5]), ("tokens", (1,), [5] * 11)):
            call = stub.Propose()
            await call.write(message(1, *((id, 0, tokens) for id in ids)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(field)
        await idle(server)
    assert sorted(proposer.forgotten) == ["1/1", "1/2"]
