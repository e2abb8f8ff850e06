"""grpc-requests: a client that knows of the API only what the server's reflection says."""

from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version

import grpc
from case import HISTORY, MODEL, SESSION, WEATHER, case, leaving, report
from grpc_requests import Client

ADDRESS = os.environ["PENSTOCK_GRPC"]
SERVICE = "penstock.v1.Gateway"
HELLO = [{"role": "user", "content": "Hello!"}]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
)
TOOL = {"name": "get_weather", "description": "The weather in a city", "parameters": SCHEMA, "strict": True}


def ask(client: Client, metadata=(), **more):
    request = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 40, **more}
    return client.request(SERVICE, "ChatCompletion", request, metadata=metadata)


def text(chunks) -> str:
    return "".join(chunk.get("content", "") for chunk in chunks)


@case
def services():
    client = Client(ADDRESS)
    assert SERVICE in client.service_names and "grpc.health.v1.Health" in client.service_names
    assert client.request("grpc.health.v1.Health", "Check")["status"] == "SERVING"
    assert [model["id"] for model in client.request(SERVICE, "ListModels")["models"]] == [MODEL]


@case
def stream():
    chunks = list(ask(Client(ADDRESS)))
    assert text(chunks) and chunks[-1]["usage"]["completion_tokens"] > 0


@case
def tools():
    asked = {"messages": [{"role": "user", "content": WEATHER}], "tools": [TOOL], "tool_choice": "required"}
    pieces = [call for chunk in ask(Client(ADDRESS), **asked) for call in chunk.get("tool_calls", ())]
    assert pieces[0]["name"] == "get_weather"


@case
def structured():
    found = text(ask(Client(ADDRESS), constraint={"json_schema": SCHEMA}))
    assert found in ('{"city": "Oslo"}', '{"city": "Bergen"}'), found


@case
def errors():
    try:
        list(ask(Client(ADDRESS), temperature=-1))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "temperature" in error.details()
    else:
        raise AssertionError("a temperature below zero was served")


@case
def second_turn_is_cached():
    client, messages, cached = Client(ADDRESS), [{"role": "user", "content": HISTORY}], []
    for _ in range(2):
        chunks = list(ask(client, tuple(SESSION.items()), messages=messages))
        cached.append(chunks[-1]["usage"].get("cached_tokens", 0))
        messages += [{"role": "assistant", "content": text(chunks)}, {"role": "user", "content": "And then?"}]
    assert cached[1] > 100 > cached[0], cached


@case
async def cancel():
    """By a call's own cancel, and by its deadline."""
    asked = {"model": MODEL, "messages": HELLO, "ignore_eos": True}

    def leave() -> None:
        call = Client(ADDRESS).request(SERVICE, "ChatCompletion", asked, raw_output=True)
        next(call)
        call.cancel()

    def wait_too_short() -> None:
        try:
            list(Client(ADDRESS).request(SERVICE, "ChatCompletion", asked, timeout=0.5))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error

    async with leaving():
        await asyncio.to_thread(leave)
    async with leaving():
        await asyncio.to_thread(wait_too_short)


@case
async def eight_at_once():
    client = Client(ADDRESS)
    assert all(await asyncio.gather(*(asyncio.to_thread(lambda: text(ask(client))) for _ in range(8))))


report(grpc_requests=version("grpc-requests"), grpcio=version("grpcio"))
