"""Workers that die, clients that leave, crowds: no token is lost or doubled, everything is freed within a second."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import grpc
import httpx2
import openai
import pytest

from penstock.errors import DeadlineExceeded, Internal, InvalidRequest, Overloaded, Unavailable
from penstock.gateway.completing.threads import Threads
from penstock.gateway.mesh.faults import blames_member
from penstock.rpc.errors import to_trailers
from penstock.rpc.interceptors import NOT_READ
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

HELLO = [{"role": "user", "content": "hi"}]
TEXT = "The quick brown fox."


async def ask(setup, **body):
    answer = await setup.client.chat.completions.create(model="tiny", messages=HELLO, **body)
    return answer.choices[0].message.content, answer.usage


async def test_prefill_dies_and_decode_computes_by_itself(setup):
    setup.script.prefill_dies = True
    setup.script.cached = {"host": 8}
    text, usage = await ask(setup)
    assert (text, usage.prompt_tokens_details.cached_tokens) == (TEXT, 8)
    assert len(setup.mesh.router.asks) == 1


async def test_a_failed_handoff_sends_nothing_twice(setup):
    setup.script.handoff_fails = True
    setup.script.cached = {"nvme": 4}
    text, usage = await ask(setup)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    assert usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("batch", [1, 4])
async def test_tokens_that_come_again_are_dropped(setup, batch):
    setup.script.repeat, setup.script.batch = True, batch
    text, usage = await ask(setup, logprobs=True)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)


@pytest.mark.parametrize(("prefill", "after"), [(True, 2), (True, 5), (False, 1), (False, 5)])
async def test_decode_dies_and_another_takes_over(setup, prefill, after):
    setup.script.prefill, setup.script.decode_dies_after = prefill, after
    setup.script.cached = {"host": 8}
    text, usage = await ask(setup)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    first, second = setup.mesh.router.asks
    assert (first.avoid, second.avoid, second.full) == ([], ["decode-0"], [])
    assert second.output_tokens == len(setup.mesh.decodes[1].requests[0].output_ids)
    assert usage.prompt_tokens_details.cached_tokens == 8
    assert usage.prompt_tokens == 8 + usage.model_dump()["penstock"]["computed_tokens"]


@pytest.mark.parametrize("prefill", [True, False])
async def test_a_worker_that_refuses_to_start_is_avoided(setup, prefill):
    setup.script.prefill = prefill
    setup.script.generate = lambda worker, request: Overloaded("full") if worker.name == "decode-0" else None
    assert (await ask(setup))[0] == TEXT
    asks = setup.mesh.router.asks
    assert [list(asked.avoid) for asked in asks] == [[], ["decode-0"]]
    assert list(asks[1].full) == ["decode-0"], "it had no room: no fault of its own"


async def test_moves_are_counted(setup):
    metrics = setup.gateway.metrics.registry
    await setup.gateway.reception.admission.idle()  # an earlier test's request may only just have lost its client
    before = metrics.get_sample_value("penstock_replans_total", {"model_name": "tiny"})
    setup.script.decode_dies_after = 2
    await ask(setup)
    await setup.gateway.reception.admission.idle()
    assert metrics.get_sample_value("penstock_replans_total", {"model_name": "tiny"}) == before + 1


async def test_a_stream_pauses_and_goes_on(setup):
    setup.script.decode_dies_after = 3
    stream = await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
    assert list(setup.mesh.decodes[1].requests[0].output_ids) == setup.ids(TEXT)[:3]


async def test_a_first_token_that_never_came_is_made_again(setup):
    """Prefill has handed off and dies before it has told the gateway: decode goes on from token 1, as it should."""
    setup.script.prefill_dies_late = True
    text, usage = await ask(setup)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    assert list(setup.mesh.router.asks[1].avoid) == ["prefill-0"]


async def test_when_all_workers_fail_the_client_hears_of_it(opened):
    async with opened(failover_s=0.2) as setup:
        setup.script.generate = lambda worker, request: Unavailable("gone")
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(setup)
    assert failed.value.status_code == 503
    assert "127.0.0.1" not in str(failed.value) and "decode-" not in str(failed.value)


async def test_an_error_after_the_first_byte_is_an_event(setup):
    setup.script.decode_dies_after = 3
    refusal = InvalidRequest("no, thank you", field="prompt")
    setup.script.generate = lambda worker, request: refusal if worker.name == "decode-1" else None
    stream = await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="no, thank you"):
        async for _ in stream:
            pass


async def test_a_request_that_makes_every_worker_fail_ends_soon(setup):
    """Whoever goes on to try it fails the steps of others, worker after worker."""
    calls = []

    def breaks(worker, request):
        calls.append(worker.name)
        return Internal("the model's logits are not finite numbers")

    setup.script.generate = breaks
    async with asyncio.timeout(10):
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(setup)
    assert (failed.value.status_code, len(calls)) == (500, 3)
    assert "finite" not in str(failed.value)


async def test_a_worker_with_a_defect_does_not_fail_a_request_that_another_can_do(setup):
    setup.script.generate = lambda worker, request: Internal("a defect") if worker.name == "decode-0" else None
    assert (await ask(setup))[0] == TEXT


async def test_the_router_refuses(opened):
    async with opened(failover_s=0.2) as setup:
        for error, status, kind in (
            (Overloaded("queue of 127.0.0.1 is full", retry_after=7), 503, openai.InternalServerError),
            (Unavailable("no worker at 127.0.0.1"), 503, openai.InternalServerError),
        ):
            setup.script.refuse = error
            with pytest.raises(kind) as failed:
                await ask(setup)
            assert failed.value.status_code == status
            assert "127.0.0.1" not in str(failed.value)
            assert int(failed.value.response.headers["retry-after"]) >= 1
    assert failed.value.response.headers["x-request-id"]


async def test_an_overloaded_mesh_refuses_at_once(setup):
    """The router's refusal, and that of every worker: nobody waits until there is room."""
    async with asyncio.timeout(5):
        setup.script.refuse = Overloaded("the queue is full", retry_after=7)
        with pytest.raises(openai.InternalServerError):
            await ask(setup)
        assert len(setup.mesh.router.asks) == 1
        setup.script.refuse, setup.script.prefill = None, False
        setup.script.generate = lambda worker, request: Overloaded("full")
        with pytest.raises(openai.InternalServerError):
            await ask(setup)
    assert [list(asked.avoid) for asked in setup.mesh.router.asks[1:]] == [
        [],
        ["decode-0"],
        ["decode-0", "decode-1"],
    ]


async def test_a_request_waits_for_workers_to_come(setup):
    """The router has none, and says so to all who watch it; when one joins, the request goes on."""
    setup.script.refuse = Unavailable("no worker has joined")
    setup.mesh.set_view(ready=False)
    await setup.gateway.view.until(False)
    asking = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: len(setup.mesh.router.asks) == 1)
    setup.script.refuse = None
    setup.mesh.set_view(ready=True)
    assert (await asking)[0] == TEXT
    assert len(setup.mesh.router.asks) == 2


async def test_a_stream_waits_for_its_only_worker_to_come_back(setup):
    """Both workers are gone after three tokens, or before: what a worker has sent last may be lost with it. What comes
    back serves the rest."""
    setup.script.decode_dies_after = 3
    gone = itertools.chain([None], itertools.repeat(Unavailable("gone")))
    setup.script.generate = lambda worker, request: next(gone)
    asking = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: len(setup.mesh.router.asks) >= 4)
    setup.script.generate = lambda worker, request: None
    text, usage = await asking
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)


@pytest.mark.parametrize("prefill", [True, False])
async def test_calls_to_a_worker_that_falls_silent_are_ended(setup, prefill):
    """It hangs with its connections open; the router has noticed."""
    setup.script.hang, setup.script.prefill = True, prefill
    asking = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: any(worker.live for worker in setup.mesh.decodes))
    try:
        setup.script.hang = False
        setup.mesh.set_view(ready=True, silent=("decode-0",))
        async with asyncio.timeout(5):
            assert (await asking)[0] == TEXT
    finally:
        setup.mesh.set_view(ready=True)
    assert list(setup.mesh.router.asks[-1].avoid) == ["decode-0"]


async def test_a_prefill_worker_that_falls_silent_takes_nobody_with_it(setup):
    """Decode waits for its hand-off: that call is ended, too."""
    setup.script.prefill_hangs = True
    asking = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: any(worker.live for worker in setup.mesh.prefills))
    try:
        setup.mesh.set_view(ready=True, silent=("prefill-0",))
        async with asyncio.timeout(5):
            assert (await asking)[0] == TEXT
    finally:
        setup.mesh.set_view(ready=True)
    assert list(setup.mesh.router.asks[-1].avoid) == ["prefill-0"]


async def test_a_prefill_worker_that_falls_silent_between_its_token_and_its_handoff(setup):
    """Its own call has ended well by then; decode still waits for it."""
    setup.script.handoff_hangs = True
    asking = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: len(setup.mesh.router.progress) > 0)  # the token has come
    try:
        setup.mesh.set_view(ready=True, silent=("prefill-0",))
        async with asyncio.timeout(5):
            text, usage = await asking
    finally:
        setup.mesh.set_view(ready=True)
    assert (text, usage.completion_tokens) == (TEXT, len(setup.ids(TEXT)) + 1)
    assert list(setup.mesh.router.asks[-1].avoid) == ["prefill-0"]


async def test_a_prefill_worker_that_falls_silent_after_its_handoff_takes_nothing_with_it(setup):
    """Decode has what it needs."""
    setup.script.hang, setup.script.repeat, setup.script.batch = True, True, 2
    asking = asyncio.create_task(ask(setup))
    await setup.mesh.until(lambda: any(told.generated > 1 for told in setup.mesh.router.progress))
    try:
        setup.mesh.set_view(ready=True, silent=("prefill-0",))
        setup.script.gate.set()
        async with asyncio.timeout(5):
            assert (await asking)[0] == TEXT
    finally:
        setup.mesh.set_view(ready=True)
    assert len(setup.mesh.router.asks) == 1


async def test_a_worker_that_counts_wrong_is_a_counted_defect(opened):
    """The client sees what the worker counted: nothing is made to fit."""
    async with opened() as setup:
        setup.script.cached, setup.script.miscount = {"host": 8}, 3
        _, usage = await ask(setup)
        await setup.gateway.reception.admission.idle()
        own = usage.model_dump()["penstock"]
        assert (own["cached_tokens"]["host"], own["computed_tokens"]) == (8, usage.prompt_tokens - 8 + 3)
        assert setup.gateway.metrics.registry.get_sample_value("penstock_usage_defects_total") == 1


async def test_progress_is_told(setup):
    await ask(setup)
    await setup.mesh.until(lambda: setup.mesh.live == 0)
    progress = setup.mesh.router.progress
    assert progress[0].prefill_done
    assert progress[-1].generated == len(setup.ids(TEXT)) + 1


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything(setup, stream, prefill):
    setup.script.hang, setup.script.prefill = True, prefill
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        body = {"model": "tiny", "messages": HELLO, "stream": stream, "n": 2}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await setup.mesh.until(lambda: sum(worker.live for worker in setup.mesh.decodes) == 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(1):
        await setup.mesh.until(lambda: setup.mesh.live == 0)
        await setup.gateway.reception.admission.idle()


async def test_a_grpc_client_that_leaves_frees_everything(setup):
    setup.script.hang = True
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        message = gateway_pb2.ChatMessage(role="user", content="hi")
        request = gateway_pb2.ChatCompletionRequest(model="tiny", messages=[message])
        call = gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(request)
        assert (await call.read()).content == "T"
        call.cancel()
        async with asyncio.timeout(1):
            await setup.mesh.until(lambda: setup.mesh.live == 0)
            await setup.gateway.reception.admission.idle()


async def test_a_crowd_is_refused_at_once(opened):
    async with opened(max_live_requests=2) as setup:
        setup.script.hang = True
        streams = [
            await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) for _ in range(2)
        ]
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(setup)
        assert failed.value.response.headers["retry-after"] == "1"
        assert (failed.value.status_code, failed.value.code) == (503, "overloaded")
        async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
            call = gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(gateway_pb2.ChatCompletionRequest())
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            await stream.close()
        await setup.mesh.until(lambda: setup.mesh.live == 0)
        await setup.gateway.reception.admission.idle()
        setup.script.hang = False
        assert (await ask(setup))[0] == TEXT


async def test_the_deadline_of_the_edge_reaches_the_workers(opened):
    async with opened(request_timeout_s=0.3) as setup:
        setup.script.hang = True
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(setup)
        assert failed.value.status_code == 504
        await setup.mesh.until(lambda: setup.mesh.live == 0)


async def test_a_slow_reader_gets_merged_deltas(setup):
    """Nothing is read until the model has said everything; memory holds one delta, the text is whole."""
    text = "word " * 3000
    ids = setup.ids(text)
    setup.script.say = lambda request: ids[:2000]
    setup.script.batch = 1
    host, _, port = setup.gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await setup.mesh.until(lambda: any(worker.requests for worker in setup.mesh.decodes))
    await setup.mesh.until(lambda: setup.mesh.live == 0, timeout_s=20)
    raw = await reader.read(-1)
    chunks = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    found = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert found == setup.tokenizer.decode(ids[:2000])
    writer.close()


async def test_a_stream_that_has_begun_is_never_silent_for_long(opened):
    """One that has not begun is left alone: its error is to be a status."""
    async with opened(first_ping_s=60.0, ping_s=0.05) as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        setup.script.hang = True
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            heard: list[str] = []
            async for line in answer.aiter_lines():
                heard.append(line)
                if heard.count(": ping") == 3:
                    break
        assert heard[0].startswith("data: ")


async def test_silence_is_filled_with_comments(opened):
    async with opened(first_ping_s=0.05) as setup:
        setup.script.hang = True
        async with httpx2.AsyncClient(base_url=setup.url) as client:
            body = {"model": "tiny", "messages": HELLO, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line == ": ping":
                        break


async def test_hopeless_prompts_are_refused_unread(setup):
    prompt = [{"role": "user", "content": "word " * 2_000_000}]
    async with asyncio.timeout(5):
        with pytest.raises(openai.BadRequestError) as failed:
            await setup.client.chat.completions.create(model="tiny", messages=prompt)
    assert failed.value.code == "context_length_exceeded"


async def test_channels_to_lost_workers_are_closed(opened):
    async with opened() as setup:
        channels = setup.gateway.reception.models.first._workers._channels
        setup.script.generate = lambda worker, request: Unavailable("gone") if worker.name == "decode-0" else None
        assert (await ask(setup))[0] == TEXT
        await setup.gateway.reception.admission.idle()
        lost, found = (worker.address for worker in setup.mesh.decodes)
        assert (lost, "worker") not in channels._open
        assert (found, "worker") in channels._open


async def test_a_stream_without_workers_gets_comments_until_its_deadline(opened):
    """Then it hears why. Without a deadline of its own it would have heard at once."""
    async with (
        opened(failover_s=0.05, first_ping_s=0.1, ping_s=0.1) as setup,
        httpx2.AsyncClient(base_url=setup.url) as http,
    ):
        setup.script.refuse = Unavailable("no worker is here")
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        begun = time.perf_counter()
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-penstock-timeout": "1.5"})
        assert 1.4 < time.perf_counter() - begun < 10
        events = answer.text.removesuffix("\n\n").split("\n\n")
        assert len([event for event in events if event.startswith(":")]) >= 5
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert events[-1] == "data: [DONE]"
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 503


async def test_the_deadline_counts_where_prompts_wait_for_threads(setup, monkeypatch):
    async def never(self, work, size, tenant):
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Threads, "render", never)
    with pytest.raises(openai.APIStatusError, match="too long to prepare") as failed:
        await setup.client.chat.completions.create(
            model="tiny", messages=HELLO, extra_headers={"x-penstock-timeout": "0.2"}
        )
    assert failed.value.status_code == 504


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "1e9"])
async def test_a_deadline_that_is_none_is_refused(setup, timeout):
    with pytest.raises(openai.BadRequestError) as failed:
        await setup.client.chat.completions.create(
            model="tiny", messages=HELLO, extra_headers={"x-penstock-timeout": timeout}
        )
    assert failed.value.body["param"] == "x-penstock-timeout" and timeout in failed.value.body["message"]


@pytest.mark.parametrize(("code", "elsewhere"), [(NOT_READ, True), (None, False)])
def test_what_a_gateway_has_not_read_in_time_is_no_fault_of_the_client(code, elsewhere):
    """It stood still, and asks another worker when it goes on; a deadline is the client's."""
    error = DeadlineExceeded("too late", code=code)
    status = grpc.StatusCode.DEADLINE_EXCEEDED
    failed = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*to_trailers(error)), "too late")
    assert blames_member(failed) is elsewhere
