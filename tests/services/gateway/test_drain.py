"""The end of a gateway: what runs finishes, what comes is refused, and nobody's connection is cut without a word."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack

import grpc
import httpx2
import pytest

from penstock.v1 import gateway_pb2, gateway_pb2_grpc

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Stopping:
    """A gateway with requests that wait for `gate`, and its end."""

    def __init__(self, setup, client: httpx2.AsyncClient, stack: AsyncExitStack) -> None:
        self.setup = setup
        self.client = client
        self._stack = stack

    async def begin(self, *, stream: bool) -> asyncio.Task:
        """A request that has got as far as its first token."""
        before = sum(worker.live for worker in self.setup.mesh.decodes)
        task = asyncio.create_task(self.client.post(CHAT, json={**HELLO, "stream": stream}))
        await self.setup.mesh.until(lambda: sum(worker.live for worker in self.setup.mesh.decodes) > before)
        return task

    def stop(self) -> asyncio.Task:
        return asyncio.create_task(self._stack.aclose())

    async def closing(self) -> None:
        """Returns when the end has begun, as a client sees it."""
        while (await self.client.get("/health")).status_code == 200:
            await asyncio.sleep(0)


@pytest.fixture
def stopping(opened):
    async def make(stack: AsyncExitStack, **settings) -> Stopping:
        client = await stack.enter_async_context(httpx2.AsyncClient(timeout=20))
        inner = await stack.enter_async_context(AsyncExitStack())
        setup = await inner.enter_async_context(opened(**settings))
        client.base_url = setup.url
        setup.script.hang = True
        return Stopping(setup, client, inner)

    return make


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


async def test_what_runs_finishes_and_what_comes_is_refused(stopping):
    async with AsyncExitStack() as stack:
        gateway = await stopping(stack, drain_s=10)
        streams = [await gateway.begin(stream=True) for _ in range(2)]
        whole = await gateway.begin(stream=False)
        end = gateway.stop()
        await gateway.closing()
        for stream in (False, True):
            late = await gateway.client.post(CHAT, json={**HELLO, "stream": stream})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
            assert int(late.headers["retry-after"]) >= 1
        assert (await gateway.client.get("/healthz")).status_code == 200
        gateway.setup.script.gate.set()
        for task in streams:
            found = events((await task).text)
            assert found[-1] == "[DONE]" and json.loads(found[-2])["choices"][0]["finish_reason"] == "stop"
        assert (await whole).json()["choices"][0]["message"]["content"] == "The quick brown fox."
        await end


async def test_at_the_end_of_the_grace_there_is_an_error_and_no_cut(stopping):
    async with AsyncExitStack() as stack:
        gateway = await stopping(stack, drain_s=0.2)
        streams = [await gateway.begin(stream=True) for _ in range(3)]
        wholes = [await gateway.begin(stream=False) for _ in range(2)]
        began = time.perf_counter()
        await gateway.stop()
        assert time.perf_counter() - began < 3
        for task in streams:
            answer = await task
            *before, error, done = events(answer.text)
            assert json.loads(before[0])["choices"][0]["delta"]["role"] == "assistant"
            assert (json.loads(error)["error"]["code"], done) == ("stopping", "[DONE]")
        for task in wholes:
            answer = await task
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
            assert answer.headers["retry-after"] == "1"


async def test_bodies_that_still_arrive_are_told_too(stopping):
    async with AsyncExitStack() as stack:
        gateway = await stopping(stack, drain_s=0.1)
        reader, writer = await asyncio.open_connection(*gateway.setup.gateway.address.split(":"))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{{".encode())
        await writer.drain()
        while not gateway.setup.gateway.reception.admission.live:
            await asyncio.sleep(0)
        end = gateway.stop()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503")
        await end
        writer.close()


async def test_calls_by_grpc_are_told_too(stopping):
    async with AsyncExitStack() as stack:
        gateway = await stopping(stack, drain_s=0.2)
        address = gateway.setup.gateway.grpc_address
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = gateway_pb2_grpc.GatewayStub(channel)
        message = gateway_pb2.ChatMessage(role="user", content="hi")
        request = gateway_pb2.ChatCompletionRequest(model="tiny", messages=[message])
        call = stub.ChatCompletion(request)
        await call.read()
        end = gateway.stop()
        await gateway.closing()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.ChatCompletion(request).read()
        assert late.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as told:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE and "stopping" in told.value.details()
        await end


async def test_an_idle_gateway_ends_at_once(stopping):
    async with AsyncExitStack() as stack:
        gateway = await stopping(stack, drain_s=10)
        assert (await gateway.client.get("/health")).status_code == 200  # the connection stays open
        began = time.perf_counter()
        await gateway.stop()
        assert time.perf_counter() - began < 1.5
