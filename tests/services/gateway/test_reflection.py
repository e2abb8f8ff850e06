"""A client that knows the gateway by reflection alone, as grpcurl and the like do: none of our generated code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

pytestmark = pytest.mark.attack


GATEWAY = "penstock.v1.Gateway"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Foreigner:
    """Asks by names and JSON, with what the server says about itself."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.told = ProtoReflectionDescriptorDatabase(channel)
        self._service = DescriptorPool(self.told).FindServiceByName(GATEWAY)

    def methods(self) -> set[str]:
        return set(self._service.methods_by_name)

    def start(self, name: str, request: Mapping[str, Any]) -> Any:
        """A call of a method that streams."""
        method = self._service.methods_by_name[name]
        assert method.server_streaming
        return self._callable(self._channel.unary_stream, method)(self._filled(method, request), timeout=30)

    def stream(self, name: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for message in self.start(name, request):
            yield MessageToDict(message, preserving_proto_field_name=True)

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        method = self._service.methods_by_name[name]
        answer = self._callable(self._channel.unary_unary, method)(self._filled(method, request), timeout=30)
        return MessageToDict(answer, preserving_proto_field_name=True)

    def _callable(self, make: Any, method: Any) -> Any:
        return make(
            f"/{GATEWAY}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    def _filled(self, method: Any, request: Mapping[str, Any]) -> Message:
        return ParseDict(dict(request), GetMessageClass(method.input_type)())


@pytest.fixture
async def foreigner(setup):
    def opened() -> tuple[grpc.Channel, Foreigner]:
        channel = grpc.insecure_channel(setup.gateway.grpc_address)
        return channel, Foreigner(channel)

    channel, made = await asyncio.to_thread(opened)
    yield made
    await asyncio.to_thread(channel.close)


async def test_it_is_told_what_there_is(foreigner):
    services = await asyncio.to_thread(lambda: set(foreigner.told.get_services()))
    assert {GATEWAY, "grpc.health.v1.Health"} <= services
    assert foreigner.methods() == {
        "ChatCompletion",
        "Completion",
        "ListModels",
        "HintSession",
        "PastRequest",
        "EvictTenant",
    }
    assert [model["id"] for model in (await asyncio.to_thread(foreigner.ask, "ListModels", {}))["models"]] == ["tiny"]


async def test_it_chats_and_calls_tools(setup, foreigner):
    def chat(**fields: Any) -> list[dict[str, Any]]:
        return list(foreigner.stream("ChatCompletion", {**HELLO, **fields}))

    *chunks, last = await asyncio.to_thread(chat)
    assert "".join(chunk.get("content", "") for chunk in chunks) == "The quick brown fox."
    assert int(last["usage"]["completion_tokens"]) > 0
    setup.says(CALL)
    tool = {"name": "get_weather", "parameters": '{"type": "object", "properties": {"city": {"type": "string"}}}'}
    chunks = await asyncio.to_thread(lambda: chat(tools=[tool]))
    deltas = [delta for chunk in chunks for delta in chunk.get("tool_calls", ())]
    assert deltas[0]["name"] == "get_weather" and "Oslo" in "".join(delta.get("arguments", "") for delta in deltas)
    assert [chunk["finish_reason"] for chunk in chunks if "finish_reason" in chunk] == ["tool_calls"]


async def test_it_continues_raw_prompts(foreigner):
    request = {"model": "tiny", "prompts": ["a", "b"], "return_token_ids": True}
    *chunks, last = await asyncio.to_thread(lambda: list(foreigner.stream("Completion", request)))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.get("choice", 0)] += chunk.get("text", "")
    assert set(texts.values()) == {"The quick brown fox."}
    counted = int(last["usage"]["completion_tokens"])
    assert sum(len(chunk.get("token_ids", ())) for chunk in chunks) == counted > 0


async def test_it_is_refused_by_name(foreigner):
    def refused() -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            list(foreigner.stream("ChatCompletion", {**HELLO, "temperature": -1}))
        return caught.value

    error = await asyncio.to_thread(refused)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "temperature" in error.details()


async def test_it_cancels(setup, foreigner):
    setup.script.hang = True

    def first_then_gone() -> None:
        call = foreigner.start("ChatCompletion", HELLO)
        assert next(call).content
        call.cancel()

    await asyncio.to_thread(first_then_gone)
    await setup.mesh.until(lambda: setup.mesh.live == 0)
