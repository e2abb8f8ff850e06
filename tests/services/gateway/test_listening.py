"""The gateway's listeners: what comes on them, what becomes of calls when they break, and workers without them."""

from __future__ import annotations

import asyncio
import math
import time

import grpc
import openai
import pytest
from structlog.testing import capture_logs

from penstock.gateway.mesh import listening, workers
from penstock.gateway.mesh.listening import Listening
from penstock.rpc.channels import Channels
from penstock.worker.serving.listening import Listeners

HELLO = [{"role": "user", "content": "hi"}]
TEXT = "The quick brown fox."


async def ask(setup, **body):
    answer = await setup.client.chat.completions.create(model="tiny", messages=HELLO, **body)
    return [choice.message.content for choice in answer.choices], answer.usage


class Nobody:
    """A receiver of nothing."""

    def token(self, index, id): ...

    def report(self, gain): ...


@pytest.fixture
async def standing(setup):
    """The worker has the gateway's listener, and keeps it while the test runs: whose first event is ready before has
    its tokens on its own stream."""
    lent = setup.gateway.reception.models.first._workers
    address = setup.mesh.decodes[0].address
    async with lent.at(address) as channel:
        with lent.listening(address, channel) as found, found.call(Nobody(), lambda _error: None):
            async with asyncio.timeout(10):
                while not found._stood:
                    await asyncio.sleep(0)
            yield setup


def arrays(worker):
    return [set(batch.calls) for batch in worker.batches if batch.calls]


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
async def test_tokens_come_on_the_listener(setup, standing, prefill, batch):
    said = TEXT * 3
    setup.says(said)
    setup.script.prefill, setup.script.batch = prefill, batch
    [text], usage = await ask(setup)
    worker = setup.mesh.decodes[0]
    assert (text, usage.completion_tokens) == (said, len(setup.ids(said)) + 1)
    assert usage.model_dump()["penstock"]["drafted_tokens"] == 8
    sent = [event.event for sent in worker.batches for event in sent.events]
    total = sum(len(found.ids) for found in worker.batches) + sum(len(event.tokens) for event in sent)
    assert arrays(worker) and sent[-1].finish
    assert total == usage.completion_tokens - prefill
    await setup.mesh.until(lambda: not worker.live and not setup.mesh.router.live)


async def test_logprobs_come_on_the_listener(setup, standing):
    answer = await setup.client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=5
    )
    found = answer.choices[0].logprobs.content
    assert [one.logprob for one in found] == [-0.25 * number for number in range(1, 6)]
    assert [len(one.top_logprobs) for one in found] == [2] * 5
    assert not arrays(setup.mesh.decodes[0]) and setup.mesh.decodes[0].batches


async def test_many_calls_share_one_listener_and_a_message(setup, standing):
    """All of them wait for the same gate, and then have a token at the same time."""
    setup.script.hang = True
    asking = asyncio.create_task(ask(setup, n=4))
    worker = setup.mesh.decodes[0]
    await setup.mesh.until(lambda: worker.live == 4)
    assert worker.listening == 1
    setup.script.gate.set()
    texts, _ = await asking
    assert texts == [TEXT] * 4
    assert max(map(len, arrays(worker))) > 1


async def test_a_worker_without_listeners_uses_the_calls_own_stream(setup):
    setup.script.listens = False
    [text], usage = await ask(setup)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    assert len(setup.mesh.router.asks) == 1 and not setup.mesh.decodes[0].batches


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("prefill", [True, False])
async def test_what_a_worker_said_before_it_failed_is_heard(setup, standing, monkeypatch, prefill, batch):
    """Here all of it comes after the call's error."""
    hand_out, last_words, failed = Listening._hand_out, workers._last_words, asyncio.Event()

    async def late(listening, sent):
        await failed.wait()
        await hand_out(listening, sent)

    async def over(heard, error):
        failed.set()
        await last_words(heard, error)

    monkeypatch.setattr(Listening, "_hand_out", late)
    monkeypatch.setattr(workers, "_last_words", over)
    setup.script.prefill, setup.script.batch, setup.script.decode_dies_after = prefill, batch, 4
    [text], usage = await ask(setup)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    batches = setup.mesh.decodes[0].batches
    said = sum(len(sent.ids) + sum(len(one.event.tokens) for one in sent.events) for sent in batches)
    assert said >= 3
    assert [asked.output_tokens for asked in setup.mesh.router.asks] == [0, said + prefill]


async def test_an_answer_whose_last_tokens_do_not_come_ends_at_its_deadline(setup, standing, monkeypatch):
    """The call itself has ended well by then."""

    async def never(listening, sent):
        await asyncio.Event().wait()

    monkeypatch.setattr(Listening, "_hand_out", never)
    setup.script.prefill = False
    began = time.monotonic()
    with pytest.raises(openai.APIStatusError) as failed:
        await setup.client.chat.completions.create(
            model="tiny", messages=HELLO, extra_headers={"x-penstock-timeout": "0.5"}
        )
    assert failed.value.status_code == 504
    assert time.monotonic() - began < 3.0, "the gateway gives such a request up five seconds after its deadline"


async def test_a_broken_listener_moves_its_calls(setup, standing):
    setup.script.hang = True
    asking = [asyncio.create_task(ask(setup)) for _ in range(3)]
    worker = setup.mesh.decodes[0]
    await setup.mesh.until(lambda: worker.live == 3)
    setup.script.hang = False
    worker.cut.set()
    for [text], usage in await asyncio.gather(*asking):
        assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    assert [list(asked.avoid) for asked in setup.mesh.router.asks[3:]] == [["decode-0"]] * 3
    await setup.mesh.until(lambda: setup.mesh.live == 0)


async def test_a_broken_listener_is_opened_again(setup):
    """Its last user has not left the channel: the next call there has a listener all the same."""
    setup.script.listens = False
    setup.script.hang = True
    first = asyncio.create_task(ask(setup))
    worker = setup.mesh.decodes[0]
    await setup.mesh.until(lambda: worker.live == 1)
    setup.script.listens = True
    second = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: worker.live == 2 and worker.listening == 1)
    setup.script.gate.set()
    for answer in (first, second):
        [text], _ = await answer
        assert text == TEXT
    assert arrays(worker)


async def test_a_defect_of_the_reader_moves_its_calls_and_is_counted(setup, standing, monkeypatch):
    hand_out, failed = Listening._hand_out, []

    async def once(listening, batch):
        if batch.ids and not failed:
            failed.append(batch)
            raise ZeroDivisionError
        await hand_out(listening, batch)

    monkeypatch.setattr(Listening, "_hand_out", once)
    registry, counted = setup.gateway.metrics.registry, {"task": "listener"}
    before = registry.get_sample_value("penstock_task_failures_total", counted) or 0
    with capture_logs() as lines:
        [text], usage = await ask(setup)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    assert [list(asked.avoid) for asked in setup.mesh.router.asks] == [[], ["decode-0"]]
    assert registry.get_sample_value("penstock_task_failures_total", counted) == before + 1
    assert [line["event"] for line in lines if line.get("task") == "listener"] == ["background task failed"]
    await setup.mesh.until(lambda: setup.mesh.live == 0)


@pytest.fixture
def quick(monkeypatch):
    """Looks are frequent."""
    monkeypatch.setattr(listening, "_LOOK_S", 0.05)


@pytest.fixture
async def patient(setup, quick, request):
    """As `standing`, with a worker that says for how long a call may go without a token."""
    worker = setup.mesh.decodes[0]
    worker.listeners = Listeners(patience=lambda: request.param)
    setup.script.prefill, setup.script.hang = False, True
    lent = setup.gateway.reception.models.first._workers
    async with lent.at(worker.address) as channel:
        with lent.listening(worker.address, channel) as found, found.call(Nobody(), lambda _error: None):
            async with asyncio.timeout(10):
                while not found._patience_s:
                    await asyncio.sleep(0)
            yield setup


@pytest.mark.parametrize("patient", [0.2], indirect=True)
async def test_a_call_without_tokens_for_too_long_moves(patient):
    """The connection stands, and so does the worker."""
    asking = asyncio.create_task(ask(patient))
    with capture_logs() as lines:
        await patient.mesh.until(lambda: len(patient.mesh.router.asks) == 2)
    patient.script.gate.set()
    [text], usage = await asking
    assert (text, usage.completion_tokens) == (TEXT, len(patient.ids(TEXT)) + 1)
    again = patient.mesh.router.asks[1]
    assert (list(again.avoid), again.output_tokens) == (["decode-0"], 1)
    assert "no token comes for a call" in [line["event"] for line in lines]


@pytest.mark.parametrize("patient", [30.0], indirect=True)
async def test_a_worker_that_says_that_it_is_busy_keeps_its_calls(patient):
    asking = asyncio.create_task(ask(patient))
    await patient.mesh.until(lambda: patient.mesh.decodes[0].live == 1)
    await asyncio.sleep(0.6)  # many looks
    patient.script.gate.set()
    [text], _ = await asking
    assert text == TEXT and len(patient.mesh.router.asks) == 1


@pytest.mark.parametrize("patient", [30.0], indirect=True)
async def test_when_nothing_comes_from_a_worker_its_calls_move(patient, monkeypatch):
    """It says something every second."""
    asking = asyncio.create_task(ask(patient))
    await patient.mesh.until(lambda: patient.mesh.decodes[0].live == 1)
    monkeypatch.setattr(listening, "_SILENT_S", 0.3)
    await patient.mesh.until(lambda: len(patient.mesh.router.asks) == 2)
    patient.script.gate.set()
    [text], usage = await asking
    assert (text, usage.completion_tokens) == (TEXT, len(patient.ids(TEXT)) + 1)


def test_each_stall_makes_a_call_more_patient():
    async def looks():
        call = listening.HeardCall(1, Nobody(), lambda _error: None, 4.0)
        assert not call.look(0.0, 1.0), "it has not begun"
        call.token(0, 7)
        assert [call.look(now, 1.0) for now in (10.0, 13.9, 14.1)] == [False, False, True]
        assert not call.look(15.0, math.inf) and not call.look(18.9, 1.0), "its time begins anew"

    asyncio.run(looks())


async def test_a_listener_goes_with_its_channel():
    """Else a call that begins while the channel is closed would name a listener whose stream ends in this moment."""
    address, nothing, taken = "127.0.0.1:1", grpc.aio.Metadata(), []

    class Forgetting(Channels):
        async def forget(self, address):
            with lent.listening(address, self.to(address, "worker")) as found:
                taken.append(found)
            await super().forget(address)

    channels, failed = Forgetting(), []
    async with workers.open_worker_channels(channels, failed.append) as lent:
        with pytest.raises(grpc.aio.AioRpcError):
            async with lent.at(address) as channel:
                with lent.listening(address, channel) as first:
                    pass
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "gone")
        assert taken and first not in taken
    await channels.close()
    assert not failed
