"""No token waits for a later one: each reaches its reader before the worker makes the next."""

from __future__ import annotations

import asyncio

import anthropic
import grpc
import pytest

from penstock.v1 import gateway_pb2, gateway_pb2_grpc

TEXT = "The quick brown fox jumps over the lazy dog."
HELLO = [{"role": "user", "content": "hello"}]


class Beat:
    """In place of the fakes' gate: decode makes one more token for each that the reader has got."""

    def __init__(self) -> None:
        self._got = asyncio.Semaphore(0)

    async def wait(self) -> None:
        await self._got.acquire()

    def read(self, text: str) -> str:
        if text:
            self._got.release()
        return text


async def chat(setup, beat: Beat) -> str:
    read = ""
    async for chunk in await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
        for choice in chunk.choices:
            read += beat.read(choice.delta.content or "")
    return read


async def completions(setup, beat: Beat) -> str:
    read = ""
    async for chunk in await setup.client.completions.create(model="tiny", prompt="hello", stream=True):
        for choice in chunk.choices:
            read += beat.read(choice.text)
    return read


async def responses(setup, beat: Beat) -> str:
    read = ""
    async for event in await setup.client.responses.create(model="tiny", input="hello", stream=True):
        if event.type == "response.output_text.delta":
            read += beat.read(event.delta)
    return read


async def messages(setup, beat: Beat) -> str:
    read = ""
    async with anthropic.AsyncAnthropic(base_url=setup.url, api_key="none", max_retries=0) as client:
        async with client.messages.stream(model="tiny", max_tokens=100, messages=HELLO) as stream:
            async for text in stream.text_stream:
                read += beat.read(text)
    return read


async def by_grpc(setup, beat: Beat) -> str:
    read = ""
    async with grpc.aio.insecure_channel(setup.gateway.grpc_address) as channel:
        message = gateway_pb2.ChatMessage(role="user", content="hello")
        asked = gateway_pb2.ChatCompletionRequest(model="tiny", messages=[message])
        async for chunk in gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(asked):
            read += beat.read(chunk.content)
    return read


@pytest.mark.parametrize("read", [chat, completions, responses, messages, by_grpc])
async def test_no_token_waits_for_the_next(setup, read):
    setup.says(TEXT)
    setup.script.hang, setup.script.gate = True, Beat()
    async with asyncio.timeout(10):
        assert await read(setup, setup.script.gate) == TEXT
