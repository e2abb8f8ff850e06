"""No request holds the event loop up: what another client sees of it, on the clock of the wall."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import httpx2
import pytest

from penstock.testing.keys import key_file
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

CHAT = "/v1/chat/completions"
CONTEXT = 500_000
PACE_S = 0.002


@pytest.fixture
async def watched(setup):
    """A gateway with a long context whose answers come one token every two milliseconds, for as long as one reads."""
    ids = setup.ids("word") * (CONTEXT // 8)
    setup.script.say = lambda request: ids
    setup.script.pace_s = PACE_S
    setup.mesh.set_view(ready=True, context=CONTEXT)
    mesh = setup.gateway.view
    async with mesh.changed:
        await mesh.changed.wait_for(lambda: mesh.known("tiny").max_model_len == CONTEXT)
    yield setup
    setup.mesh.set_view(ready=True)
    async with mesh.changed:
        await mesh.changed.wait_for(lambda: mesh.known("tiny").max_model_len != CONTEXT)


@asynccontextmanager
async def a_stream(setup) -> AsyncIterator[AsyncIterator[bytes]]:
    """Another client's stream, raw."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with httpx2.AsyncClient(base_url=setup.url) as client, client.stream("POST", CHAT, json=body) as answer:
        yield answer.aiter_raw()


async def longest_gap(setup, request: Callable[[httpx2.AsyncClient], Awaitable[object]]) -> float:
    """The longest silence in another client's stream while `request` is served, in seconds of the clock. The request's
    client is made before: reading its certificates takes longer than what is measured here."""
    gap = 0.0
    async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client, a_stream(setup) as pieces:
        await anext(pieces)
        serving = asyncio.ensure_future(request(client))
        last = time.perf_counter()
        async for _ in pieces:
            now = time.perf_counter()
            gap, last = max(gap, now - last), now
            if serving.done():
                break
        await serving
    return gap


@pytest.mark.parametrize("raw", [False, True])
async def test_tokenizing_stops_nobody_elses_stream(watched, raw):
    """A million tokens, which are then too many. The bound is a share of what they take, however busy the machine."""
    text = "word " * 200_000
    begin = time.perf_counter()
    await asyncio.to_thread(watched.tokenizer.encode_batch, [text])
    takes = time.perf_counter() - begin
    prompt = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
    body = json.dumps({"model": "tiny", **prompt}).encode()
    statuses = []

    async def send(client: httpx2.AsyncClient) -> None:
        statuses.append((await client.post("/v1/completions" if raw else CHAT, content=body)).status_code)

    gap = await longest_gap(watched, send)
    assert statuses == [400]
    assert gap < takes / 4


def tool(**fields: object) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


def chat(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "tiny", "messages": messages, "max_tokens": 1, **fields}).encode()


def raw_chat(text: str) -> bytes:
    """With the text as it is, without escapes."""
    return chat(messages=[{"role": "user", "content": "P"}]).replace(b'"P"', f'"{text}"'.encode())


MANY = 3_000_000
"""Empty lists in nine megabytes: a decoder is busy with them for seconds, and so is the garbage collector."""
LISTS = "[" + "[]," * MANY + "[]]"
ATTACKS = {
    "lists in a tool": (chat(tools=[tool(parameters={"a": "LISTS"})]).replace(b'"LISTS"', LISTS.encode()), 400),
    "members in a tool": (
        chat(tools=[tool(parameters="MEMBERS")]).replace(
            b'"MEMBERS"', b"{" + b",".join(b'"%d":1' % number for number in range(MANY // 3)) + b"}"
        ),
        400,
    ),
    "numbers in a prompt": (b'{"model": "tiny", "prompt": [' + b"1," * MANY + b"1]}", 400),
    "lists that are refused": (chat(response_format="LISTS").replace(b'"LISTS"', LISTS.encode()), 400),
    "a schema of two megabytes": (chat(json_schema={"type": "object", "description": "word " * 400_000}), 400),
    "a schema of many properties": (
        chat(json_schema={"type": "object", "properties": {f"{n:0100}": {"title": "x" * 60} for n in range(5_000)}}),
        400,
    ),
    "a schema in a string": (chat(json_schema=LISTS[:900_000]), 400),
    "a grammar of a megabyte": (chat(grammar="root ::= " + '"a" | ' * 160_000 + '"a"'), 400),
    "lists in arguments": (
        chat(
            messages=[
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": str(number), "type": "function", "function": {"name": "f", "arguments": LISTS[:20_000]}}
                        for number in range(450)
                    ],
                },
            ]
        ),
        400,
    ),
    "control tokens in a tool": (chat(tools=[tool(parameters={}, description="<|im_end|>" * 900_000)]), 400),
    "a long description": (chat(tools=[tool(parameters={}, description="word " * 1_600_000)]), 400),
    "a long text in small parameters": (chat(tools=[tool(parameters={"a": "word " * 1_600_000})]), 200),
    "long reasoning": (
        chat(messages=[{"role": "assistant", "content": "x", "reasoning_content": "<|im_end|>" * 900_000}]),
        200,
    ),
}
LONGEST_S = 0.4
"""Far from both: these requests used to stop every stream for seconds; now the longest pause is some milliseconds."""


async def gap_and_status(setup, body: bytes) -> tuple[float, int]:
    """The longest silence in another client's stream while `body` is answered, and the answer's status."""
    statuses = []

    async def send(client: httpx2.AsyncClient) -> None:
        path = "/v1/completions" if b'"prompt"' in body[:30] else CHAT
        path = {b'{"prompt"': "/tokenize", b'{"tokens"': "/detokenize"}.get(body[:9], path)
        statuses.append((await client.post(path, content=body)).status_code)

    gap = await longest_gap(setup, send)
    [status] = statuses
    return gap, status


@pytest.mark.parametrize("name", ATTACKS)
async def test_no_body_stops_another_clients_stream(watched, name):
    body, status = ATTACKS[name]
    gap, got = await gap_and_status(watched, body)
    assert got == status
    assert gap < LONGEST_S


def schema(size: int) -> dict:
    """A JSON Schema of `size` bytes or a little more."""
    one = {"type": "string", "description": "word " * 12, "enum": ["a", "b"]}
    properties = {f"property_{number}": one for number in range(size // len(json.dumps({"property_00000": one})))}
    return {"type": "object", "properties": properties}


PROSE = 'Ein Wort, 一个词, ein \\"Wort\\" und noch eins 😀\\n'
LONG = {
    "a body of 10 MB": (
        chat(messages=[{"role": "user", "content": "P"}]).replace(b'"P"', f'"{PROSE * 170_000}"'.encode()),
        400,
    ),
    "a prompt of 400,000 tokens": (chat(messages=[{"role": "user", "content": "word " * 80_000}]), 200),
    "400,000 token ids": (json.dumps({"model": "tiny", "prompt": [7] * 400_000, "max_tokens": 1}).encode(), 200),
    "a schema of 2 MB": (chat(tools=[tool(parameters=schema(2_000_000))]), 400),
    "escapes": (chat(messages=[{"role": "user", "content": "\n" * 7_000_000}]), 400),
    "15 MB of emoji": (raw_chat("😀" * 3_700_000), 400),
    "15 MB of Chinese": (raw_chat("中" * 4_900_000), 400),
    "a million tokens and their texts": (
        json.dumps({"prompt": "word " * 200_000, "return_token_strs": True}).encode(),
        200,
    ),
    "the text of two million ids": (json.dumps({"tokens": [300] * 2_000_000}).encode(), 200),
    "the text of eight million ids": (b'{"tokens": [' + b"1," * 7_900_000 + b"1]}", 400),
    "half a million escapes": (chat(messages=[{"role": "user", "content": "\n" * 500_000}]), 400),
}
PAUSE_S = 0.05


@pytest.mark.parametrize("name", LONG)
async def test_a_long_request_pauses_another_clients_stream_for_less_than_50_ms(watched, name):
    """What else the machine does only makes a pause longer: the request itself makes the shortest of eight at most."""
    body, status = LONG[name]
    gaps = []
    while not gaps or (gaps[-1] >= PAUSE_S and len(gaps) < 8):
        gap, got = await gap_and_status(watched, body)
        assert got == status
        gaps.append(gap)
    assert min(gaps) < PAUSE_S


@pytest.mark.parametrize("parameters", ['{"a": ' + LISTS[: 3 * 1024 * 1024].rstrip(",") + "]}", "[" * 3_000_000])
async def test_no_message_stops_another_clients_stream(watched, parameters):
    codes = []

    async def send(client: httpx2.AsyncClient) -> None:
        message = gateway_pb2.ChatMessage(role="user", content="hi")
        tools = [gateway_pb2.FunctionTool(name="f", parameters=parameters)]
        request = gateway_pb2.ChatCompletionRequest(model="tiny", messages=[message], tools=tools)
        async with grpc.aio.insecure_channel(watched.gateway.grpc_address) as channel:
            codes.append(await gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(request).code())

    gap = await longest_gap(watched, send)
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT]
    assert gap < LONGEST_S


LOOPS = "{% for a in range(99999) %}{% for b in range(%d) %}{% endfor %}{% endfor %}"


@asynccontextmanager
async def a_template_that_loops(opened, model_dir, tmp_path, times: int, **settings: object) -> AsyncIterator:
    """A gateway whose template takes its time for the shortest of messages, if it says "slow"."""
    directory = tmp_path / "tiny"
    shutil.copytree(model_dir, directory)
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    loops = LOOPS.replace("%d", str(times))
    tokenizer["chat_template"] = f"{{% if messages[0].content | trim == 'slow' %}}{loops}{{% endif %}}x"
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    async with opened(model_dir=directory, **settings) as setup:
        ids = setup.ids("word") * 400
        setup.script.say = lambda request: ids
        setup.script.pace_s = PACE_S
        yield setup


async def test_a_slow_template_stops_nobody_elses_stream(opened, model_dir, tmp_path):
    """Two lines that take a second."""
    async with a_template_that_loops(opened, model_dir, tmp_path, 300) as setup:
        begin = time.perf_counter()
        slow = chat(messages=[{"role": "user", "content": "slow"}])
        gap = await longest_gap(setup, lambda client: client.post(CHAT, content=slow))
        takes = time.perf_counter() - begin
    assert takes > 0.3  # slow enough to be seen
    assert gap < takes / 3


async def test_an_endless_template_costs_its_sender_a_400_and_others_nothing(opened, model_dir, tmp_path):
    async with a_template_that_loops(opened, model_dir, tmp_path, 99999) as setup:
        async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client:
            slow = chat(messages=[{"role": "user", "content": "slow"}])
            endless = asyncio.ensure_future(client.post(CHAT, content=slow))
            served = 0
            while not endless.done():
                assert (await client.post(CHAT, content=chat())).status_code == 200
                served += 1
            answer = await endless
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "takes too long" in answer.json()["error"]["message"]
    assert served > 1


async def test_two_tenants_with_endless_templates_hold_nobody_else_up(opened, model_dir, tmp_path):
    """They send more than there are threads, of both sizes, again and again; a third renders at once."""
    keys = key_file(tmp_path / "keys.json", {"one": "one", "two": "two", "other": "other"})
    sized = {"short": "slow", "long": "slow" + " " * 9000}
    async with a_template_that_loops(
        opened, model_dir, tmp_path, 99999, api_keys=keys, server_key="ab" * 16, api_key="other"
    ) as setup:
        async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client:

            async def send(key: str, text: str) -> int:
                body = chat(messages=[{"role": "user", "content": text}])
                return (await client.post(CHAT, content=body, headers={"x-api-key": key})).status_code

            assert await send("other", "x") == 200
            hostile = [asyncio.ensure_future(send(key, text)) for key in ("one", "two") * 3 for text in sized.values()]
            served = 0
            while not any(request.done() for request in hostile):
                for text in ("x", "x" * 9000):
                    assert await send("other", text) == 200
                    served += 1
            assert set(await asyncio.gather(*hostile)) == {400}
    assert served > 2  # before the first of the endless ones was stopped
