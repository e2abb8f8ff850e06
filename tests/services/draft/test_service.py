"""The draft service on a real socket: readers that leave, workers that tell too fast, and too much."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from penstock.draft.drafts import Description
from penstock.engine.errors import EngineBusy
from penstock.engine.hooks import DraftTerms
from penstock.engine.request import SamplingParams
from penstock.engine.rules import FREE
from penstock.engine.speculation.leads import DraftBlockNews, DraftBlocks
from penstock.testing.drafters import PlainForesight, served_drafts
from penstock.v1 import common_pb2, draft_pb2, draft_pb2_grpc


def last_again(text):
    return text[-1]


@asynccontextmanager
async def drafting(model, ruling=None, **settings):
    """A service: its stub, its drafts and its server."""
    vocabulary = {str(number): number for number in range(9000)}
    try:
        async with served_drafts(model, Description("test", lambda: vocabulary), ruling, **settings) as (
            server,
            drafts,
        ):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield draft_pb2_grpc.DraftStub(channel), drafts, server
    finally:
        model.gate.set()


def message(number, *sequences, k=2, forget=(), **sampling):
    terms = draft_pb2.DraftTerms(
        sampling=common_pb2.Sampling(**{"max_tokens": 9, "repetition_penalty": 1.0, "top_p": 1.0, **sampling}), prompt=1
    )
    return draft_pb2.DraftNews(
        number=number,
        sequences=[
            draft_pb2.DraftSequence(id=id, keep=keep, tokens=tokens, k=k, terms=None if keep else terms)
            for id, keep, tokens in sequences
        ],
        forget=forget,
    )


async def heard(call, wanted):
    """Reads until there are that many tokens in all; those of each sequence, as (after, length, tokens)."""
    found = {}
    async with asyncio.timeout(10):
        while sum(len(tokens) for _, _, tokens in found.values()) < wanted:
            leads, first = await call.read(), 0
            for id, after, length, count in zip(leads.ids, leads.after, leads.lengths, leads.counts, strict=True):
                own, first = list(leads.tokens[first : first + count]), first + count
                if id in found and found[id][0] == after:
                    assert length == found[id][1] + len(found[id][2])
                    found[id][2].extend(own)
                else:
                    found[id] = after, length, own
    return found


async def idle(server):
    async with asyncio.timeout(10):
        await server.in_flight.idle()


async def until(fact):
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0.001)


async def test_all_streams_are_guessed_for_in_one_step_and_each_hears_of_its_own():
    model = PlainForesight(last_again)
    async with drafting(model) as (stub, drafts, _):
        calls, steps = [stub.Propose() for _ in range(3)], []
        real = model.step
        model.step = lambda: steps.append(real()) or steps[-1]
        model.gate.clear()
        for number, call in enumerate(calls):
            await call.write(message(5, (1, 0, [number]), (2, 0, [number + 10])))
        await until(lambda: len(model.told) + len(drafts._news) == 6)
        model.gate.set()
        for number, call in enumerate(calls):
            assert await heard(call, 4) == {1: (5, 1, [number] * 2), 2: (5, 1, [number + 10] * 2)}
        assert max(len(made.leads) for made in steps) == 6
        assert drafts.metrics.tokens._value.get() == 12


async def test_what_was_guessed_right_is_gone_on_from():
    async with drafting(PlainForesight(lambda text: text[-1] + 1)) as (stub, _, _):
        call = stub.Propose()
        await call.write(message(3, (1, 0, [7]), k=3))
        assert await heard(call, 3) == {1: (3, 1, [8, 9, 10])}
        await call.write(message(4, (1, 1, [8, 9]), k=3))
        assert await heard(call, 2) == {1: (3, 4, [11, 12])}
        await call.write(message(5, (1, 3, [20]), k=1))
        assert await heard(call, 1) == {1: (5, 4, [21])}


async def test_a_worker_that_reads_nothing_gets_all_guesses_at_once():
    """They are merged, not queued."""
    model = PlainForesight(lambda text: text[-1] + 1)
    async with drafting(model) as (stub, drafts, _):
        call = stub.Propose()
        await call.write(message(1, (1, 0, [0]), k=100))
        await until(lambda: drafts.metrics.tokens._value.get() == 100)
        assert await heard(call, 100) == {1: (1, 1, list(range(1, 101)))}


@pytest.mark.parametrize("when", ["while it is guessed", "after its guesses"])
async def test_a_reader_that_leaves_leaves_nothing_in_the_log(when, caplog):
    model = PlainForesight(last_again)
    with capture_logs() as lines, caplog.at_level(logging.WARNING):
        async with drafting(model) as (stub, drafts, server):
            if when == "while it is guessed":
                model.gate.clear()
            call = stub.Propose()
            await call.write(message(1, (7, 0, [1, 2, 3])))
            if when == "after its guesses":
                await heard(call, 2)
            else:
                await until(lambda: model.told or drafts._news)
            call.cancel()
            await idle(server)
            model.gate.set()
            await until(lambda: model.forgotten)
            text = drafts.metrics.text().decode()
        assert "penstock_task_failures_total{" not in text
    assert model.forgotten == [(1, 7)], "and nothing in the model"
    assert [line for line in lines if line["log_level"] not in ("debug", "info")] == []
    assert caplog.records == []


async def test_a_worker_that_tells_too_fast_has_to_wait():
    model = PlainForesight(last_again)
    model.gate.clear()
    async with drafting(model) as (stub, drafts, _):
        call = stub.Propose()

        async def write():
            for number in range(1, 2001):
                await call.write(message(number, (1, number - 1, [number])))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            await until(lambda: len(drafts._news) >= 256)
            for _ in range(100):
                await asyncio.sleep(0)
                assert len(drafts._news) <= 256
            model.gate.set()
        await until(lambda: len(model.told) == 2000)


async def test_a_tenant_s_grammars_cost_its_own_sequence_its_drafts_and_no_stream():
    model = PlainForesight(last_again)
    async with drafting(model, max_stream_tokens=100) as (stub, _, server):
        call = stub.Propose()
        await call.write(message(1, (1, 0, [5])))
        assert await heard(call, 2) == {1: (1, 1, [5, 5])}
        await call.write(message(2, (2, 0, [6]), grammar="x" * 100))
        async with asyncio.timeout(10):
            assert list((await call.read()).refused) == [2]
        await call.write(message(3, (3, 0, [7]), temperature=float("nan")))
        async with asyncio.timeout(10):
            assert list((await call.read()).refused) == [3]
        await call.write(message(4, (2, 1, [6]), (3, 1, [7]), (1, 1, [8])))
        assert await heard(call, 2) == {1: (4, 2, [8, 8])}, "the others' stream goes on"
        call.cancel()
        await idle(server)


BAD = {
    "keep": message(1, (1, 4, [5])),
    "number": message(0, (1, 0, [5])),
    "tokens": message(1, (1, 0, [])),
}


@pytest.mark.parametrize(
    ("hidden", "begin", "rows", "reason"),
    [
        (0, 0, b"1234", "tokens alone"),
        (1, 0, b"12345", "4 bytes for each"),
        (1, 0, b"", "4 bytes for each"),
        (1, 3, b"12345678", "1 to 32 of the 4 tokens"),
    ],
)
async def test_states_that_can_t_be_those_of_the_text_are_named(hidden, begin, rows, reason):
    description = Description("test", dict, (1, 2) if hidden else (), hidden)
    async with served_drafts(PlainForesight(last_again), description) as (server, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = draft_pb2_grpc.DraftStub(channel).Propose()
            news = message(1, (1, 0, [5, 6, 7, 8]))
            news.sequences[0].states.begin, news.sequences[0].states.rows = begin, rows
            await call.write(news)
            with pytest.raises(grpc.aio.AioRpcError, match="states") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason in caught.value.details()


@pytest.mark.parametrize("field", BAD)
async def test_what_does_not_fit_ends_the_stream_and_is_named(field):
    async with drafting(PlainForesight(last_again)) as (stub, _, server):
        call = stub.Propose()
        await call.write(BAD[field])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()
        await idle(server)


async def test_a_defect_of_the_model_ends_all_streams_and_the_next_ones_are_served():
    model = PlainForesight(last_again)
    with capture_logs() as lines:
        async with drafting(model) as (stub, drafts, server):
            call = stub.Propose()
            await call.write(message(1, (1, 0, [5])))
            await heard(call, 2)
            model.defect = ZeroDivisionError()
            assert await call.read() is grpc.aio.EOF
            await idle(server)
            await until(lambda: (1, 1) in model.forgotten)
            call = stub.Propose()
            await call.write(message(1, (1, 0, [6])))
            assert await heard(call, 2) == {1: (1, 1, [6, 6])}
            assert 'penstock_task_failures_total{task="drafting"} 1.0' in drafts.metrics.text().decode()
    assert [line["task"] for line in lines if line["event"] == "background task failed"] == ["drafting"]


def blocks(holder):
    terms = DraftTerms(SamplingParams(max_tokens=9), 1, frozenset(), b"one")
    return DraftBlocks(
        id=(1, 1), holder=holder, terms=terms, first=0, parent=b"", keys=[b"k"] * 5, pages=range(5), block_s=0.0
    )


class Lacking(PlainForesight):
    """Lacks some blocks of its first text, and has others that are full."""

    def __init__(self):
        super().__init__(last_again)
        self.lacking, self.full, self.answers = blocks("lacking"), blocks("full"), []

    def step(self):
        made = super().step()
        if self.told and self.lacking:
            made = replace(made, blocks=DraftBlockNews([self.lacking], [self.full], [(b"k", "named")]))
            self.lacking = None
        return made

    def stored(self, blocks, count):
        self.answers.append((blocks.holder, count))

    def give_back(self, blocks):
        self.answers.append((blocks.holder, None))


class SlowKv:
    """Answers when it is told to."""

    def __init__(self):
        self.go, self.moves, self.done = asyncio.Event(), [], None

    def moved(self, moves):
        self.moves += moves

    async def fetch(self, blocks):
        await self.go.wait()
        return 3

    def offer(self, blocks, done):
        self.done = done


async def test_blocks_are_fetched_beside_the_steps():
    model, kv = Lacking(), SlowKv()
    async with drafting(model, kv=kv) as (stub, _, _):
        call = stub.Propose()
        await call.write(message(1, (1, 0, [5]), k=20))
        assert await heard(call, 20) == {1: (1, 1, [5] * 20)}
        await until(lambda: kv.done is not None)
        assert kv.moves == [(b"k", "named")] and model.answers == []
        kv.go.set()
        await until(lambda: model.answers == [("lacking", 3)])
        kv.done()
        await until(lambda: model.answers == [("lacking", 3), ("full", None)])


async def test_pages_come_back_when_the_model_has_failed():
    """Both those of a fetch, which ends with the streams, and those that somebody still reads."""
    model, kv = Lacking(), SlowKv()
    async with drafting(model, kv=kv) as (stub, drafts, _):
        call = stub.Propose()
        await call.write(message(1, (1, 0, [5])))
        await heard(call, 2)
        await until(lambda: kv.done is not None)
        model.defect = ZeroDivisionError()
        await until(lambda: model.answers == [("lacking", 0)])
        kv.done()
        await until(lambda: model.answers == [("lacking", 0), ("full", None)])
        assert 'penstock_task_failures_total{task="drafting"} 1.0' in drafts.metrics.text().decode()


class Rules:
    """Has none, is busy, or has a defect."""

    async def of(self, sampling, prompt):
        if sampling.grammar == "busy":
            raise EngineBusy("busy")
        assert sampling.grammar != "broken"
        return sampling.grammar or sampling.bad_words, prompt, sampling.stop_token_ids


async def test_sequences_with_rules_wait_for_them():
    model = PlainForesight(last_again)
    async with drafting(model, Rules()) as (stub, _, _):
        call = stub.Propose()
        terms = {}, {"grammar": "a"}, {"bad_words": ["b"]}, {"grammar": "busy"}, {"grammar": "broken"}
        for id, sampling in enumerate(terms):
            await call.write(message(id + 1, (id, 0, [5]), **sampling))
        await until(lambda: len(model.rules) == 4)
        assert [told.ruled for told in model.told] == [False, True, True, True, True]
        made = {(1, 1): ("a", 1, frozenset()), (1, 2): (("b",), 1, frozenset())}
        assert model.rules == {**made, (1, 3): FREE, (1, 4): FREE}, "and the others' stream goes on"


async def test_it_names_its_tokens():
    async with drafting(PlainForesight(last_again)) as (stub, _, _):
        assert (await stub.Describe(draft_pb2.DescribeRequest())).tokenizer == "test"
        found = {}
        async for part in stub.Vocabulary(draft_pb2.VocabularyRequest()):
            found.update(zip(part.texts, part.ids, strict=True))
        assert found == {str(number): number for number in range(9000)}


async def test_metrics_say_what_it_did():
    model = PlainForesight(last_again)
    async with drafting(model) as (stub, drafts, _):
        call = stub.Propose()
        await call.write(message(1, (1, 0, [5])))
        await heard(call, 2)
        value = drafts.metrics.registry.get_sample_value
        assert value("penstock_draft_tokens_total") == 2 and value("penstock_draft_proposals_total") == 2
        assert value("penstock_draft_busy_seconds_total") > 0 and value("penstock_draft_sequences") == 1
        for name in ("tokens_dropped_total", "evictions_total", "refusals_total", "free_pages"):
            assert value(f"penstock_draft_{name}") == 0
