"""Whatever is wrong is refused by name, at once, in OpenAI's shape, and disturbs nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket

import httpx2
import openai
import psutil
import pytest

from penstock.gateway.door.protocol import Sparse
from penstock.gateway.request.bounds import BOUNDS

from .fakes import CONTEXT

pytestmark = pytest.mark.attack


HELLO = [{"role": "user", "content": "hi"}]
STRICT = {
    "type": "function",
    "function": {"name": "s", "strict": True, "parameters": {"properties": {"a": {"not": {"type": "string"}}}}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def post(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:

        async def send(path: str, body: object, **options):
            if isinstance(body, bytes):
                return await client.post(path, content=body, **options)
            return await client.post(path, json=body, **options)

        yield send


def check(answer, status: int, field: str | None, code: str | None = None) -> str:
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert (answer.status_code, found["param"]) == (status, field), found
    assert found["type"] == "invalid_request_error"
    assert "127.0.0.1" not in found["message"] and "0x" not in found["message"]
    if code:
        assert found["code"] == code
    if field:
        assert field.split(".")[0].split("[")[0] in found["message"]
    return found["message"]


def chat(**more) -> dict:
    return {"model": "tiny", "messages": HELLO, **more}


def message(**fields) -> dict:
    return {"model": "tiny", "messages": [fields]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'{"model": "tiny", "messages": [], "tool_choice": ' + b"[" * 100_000, None),
        (b'{"model": "\xff", "messages": []}', None),
        (b'{"model": "tiny", "messages": [], "temperature": NaN}', None),
        ({"messages": HELLO}, "model"),
        ({"model": 3, "messages": HELLO}, "model"),
        ({"model": "tiny"}, "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (message(content="x"), "messages[0].role"),
        (message(role="wizard", content="x"), "messages[0].role"),
        (message(role="user"), "messages[0].content"),
        (message(role="user", content=7), "messages[0].content"),
        (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
        (
            message(role="user", content=[{"type": "image_url", "image_url": {}}]),
            "messages[0].content[0].image_url.url",
        ),
        (message(role="user", content=[{"type": "image_url"}]), "messages[0].content[0].image_url"),
        (
            message(role="user", content=[{"type": "image_url", "image_url": {"url": "data:,x"}}]),
            "messages[0].content[0].image_url.url",
        ),
        (message(role="user", content=[{"type": "video"}]), "messages[0].content[0].type"),
        (message(role="tool", content="x"), "messages[0].tool_call_id"),
        (message(role="assistant"), "messages[0].content"),
        (message(role="assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
        (message(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(temperature="hot"), "temperature"),
        (chat(max_tokens=1.5), "max_tokens"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
        (chat(max_tokens=5, max_completion_tokens=6), "max_tokens"),
        (chat(logit_bias={"a": 1}), "logit_bias"),
        (chat(logit_bias={"5": 101}), "logit_bias.5"),
        (chat(logit_bias={str(n): 1 for n in range(1025)}), "logit_bias"),
        (chat(stop=["x"] * 17), "stop"),
        (chat(stop=""), "stop"),
        (chat(stop="x" * 257), "stop"),
        (chat(stop=[1]), "stop[0]"),
        (chat(bad_words=["x" * 200] * 41), "bad_words"),
        (chat(n=0), "n"),
        (chat(n=17), "n"),
        (chat(n=10**9), "n"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(logprobs=3), "logprobs"),
        (chat(response_format={"type": "xml"}), "response_format.type"),
        (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format.json_schema.name"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(tools=[TOOL], tool_choice="sometimes"), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": []}), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": [], "tools": []}), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}), "tool_choice"),
        (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
        (chat(tools=[{"type": "retrieval", "function": {"name": "f"}}]), "tools[0].type"),
        (chat(tools=[{"type": "function", "function": {"name": ""}}]), "tools[0].function.name"),
        (chat(tools=[TOOL, STRICT]), "tools[1].function.parameters.properties.a.not"),
        (chat(tools=[TOOL] * 513), "tools"),
        (chat(functions=[{}]), "functions"),
        (chat(function_call="auto"), "function_call"),
        (chat(modalities=["text", "audio"]), "modalities"),
        (chat(audio={"voice": "x"}), "audio"),
        (chat(web_search_options={}), "web_search_options"),
        (chat(chat_template="{{ 1 }}"), "chat_template"),
        (chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize"),
        (chat(guided_json=[]), "guided_json"),
        (chat(use_beam_search=True), "use_beam_search"),
        (chat(prompt_logprobs=1), "prompt_logprobs"),
    ],
)
async def test_chat(setup, post, body, field):
    check(await post(CHAT, body), 400, field)
    assert setup.mesh.router.asks == []


@pytest.mark.parametrize("name", sorted(name for name in BOUNDS if not name.startswith("anthropic.")))
async def test_the_table_of_bounds_is_kept(setup, post, name):
    bound = BOUNDS[name]
    body = {"model": "tiny", "prompt": "x"} if name in ("best_of", "logprobs") else chat()
    path = TEXT if "prompt" in body else CHAT
    body |= {"logprobs": True} if name == "top_logprobs" else {}
    for value in (bound.low - 1, bound.high + 1):
        given = {"5": value} if name == "logit_bias" else int(value) if float(value).is_integer() else value
        *outer, last = name.split(".")
        inner = {last: given}
        for field in reversed(outer):
            inner = {field: inner}
        answer = await post(path, {**body, **inner})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(name)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 17}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
async def test_completions(setup, post, body, field):
    check(await post(TEXT, {"model": "tiny", **body}), 400, field)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat(min_tokens=5, max_tokens=4), "min_tokens"),
        (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids"),
        (CHAT, chat(logit_bias={"1000000": 1}), "logit_bias"),
        (TEXT, {"model": "tiny", "prompt": [1, 10**6]}, "prompt"),
        (TEXT, {"model": "tiny", "prompt": [1, -1]}, "prompt"),
    ],
)
async def test_well_formed_and_impossible(setup, post, path, body, field):
    check(await post(path, body), 422, field)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model(setup, post, path):
    body = {"model": "other", **({"messages": HELLO} if path == CHAT else {"prompt": "x"})}
    check(await post(path, body), 404, "model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        await setup.client.models.retrieve("other")


async def test_unknown_paths_and_methods(setup, post):
    check(await post("/v1/images/generations", {}), 404, None)
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        check(await client.get(CHAT), 405, None)


@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_context_limit(setup, post, extra):
    prompt = [5] * (CONTEXT - 1 + extra)
    answer = await post(TEXT, {"model": "tiny", "prompt": prompt})
    if extra > 0:
        message = check(answer, 400, "prompt", "context_length_exceeded")
        assert message.startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")
        assert str(len(prompt)) in message
    else:
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 1 - extra


async def test_long_conversations_name_messages(setup, post):
    body = chat(messages=[{"role": "user", "content": "word " * 4000}])
    check(await post(CHAT, body), 400, "messages", "context_length_exceeded")


@pytest.mark.parametrize("asked", [1, 47, 48, 49, CONTEXT, CONTEXT + 1, 131_073, 2**31 - 1])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_is_lowered_to_the_room(setup, post, field, asked):
    """One rule for every value: it is an upper bound, so more than there is room for is no error."""
    say = [5] * 3000
    setup.script.say = lambda request: say
    if field == "max_tokens":
        answer = await post(TEXT, {"model": "tiny", "prompt": [5] * 2000, field: asked})
        room = 48
    else:
        answer = await post(CHAT, chat(**{field: asked}))
        room = CONTEXT - answer.json()["usage"]["prompt_tokens"]
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == min(asked, room)


async def test_the_gateways_own_limit_is_another_upper_bound(opened):
    async with opened(max_output_tokens=7) as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        for asked in (5, 8, None):
            answer = await client.post(TEXT, json={"model": "tiny", "prompt": "x", "max_tokens": asked})
            assert setup.mesh.decodes[0].requests[-1].sampling.max_tokens == min(asked or 7, 7)
            assert answer.status_code == 200


async def test_max_tokens_left_out_is_the_room_in_the_context(setup, post):
    assert (await post(TEXT, {"model": "tiny", "prompt": [5] * 2000})).status_code == 200
    assert setup.mesh.decodes[0].requests[-1].sampling.max_tokens == 48


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_limit_is_refused_before_it_is_read(opened, chunked):
    async with opened(max_body_bytes=10_000) as setup:
        host, _, port = setup.gateway.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        length = "transfer-encoding: chunked" if chunked else "content-length: 100000000"
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
        if chunked:
            writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        async with asyncio.timeout(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_bodies_are_bounded_together(opened):
    """Bodies that do not end: what they hold is bounded, and is free again when their clients leave."""
    async with opened(max_upload_bytes=100_000) as setup:
        host, _, port = setup.gateway.address.rpartition(":")
        waiting = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 70000\r\n\r\n".encode() + b" " * 60_000)
            waiting.append((reader, writer))
        ends = [asyncio.ensure_future(reader.readuntil(b"\r\n\r\n")) for reader, _ in waiting]
        async with asyncio.timeout(5):
            done, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert [end.result().split(b"\r\n")[0] for end in done] == [b"HTTP/1.1 503 Service Unavailable"]
        for end in rest:
            end.cancel()
        for _, writer in waiting:
            writer.close()
        await setup.gateway.reception.admission.idle()
        async with httpx2.AsyncClient(base_url=setup.url) as client:
            body = json.dumps(chat(max_tokens=1)).encode()
            assert (await client.post(CHAT, content=body + b" " * (90_000 - len(body)))).status_code == 200


async def test_a_template_that_refuses(opened, model_dir, tmp_path):
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('no system message, please') }}"
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    async with opened(model_dir=directory) as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        assert "no system message" in check(await client.post(CHAT, json=chat()), 400, "messages")


async def test_others_are_not_disturbed(setup, post):
    setup.script.hang = True
    stream = await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].delta.role == "assistant"
    for body in (b"{", chat(temperature=-1), chat(messages=[{"role": "user", "content": "x" * 100_000}])):
        assert (await post(CHAT, body)).status_code == 400
    assert setup.mesh.router.live == 1
    await stream.close()
    await setup.mesh.until(lambda: setup.mesh.live == 0)


async def raw(address: str, *pieces: bytes) -> bytes:
    """What the gateway says to bytes on a socket."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(5):
            return await reader.read(-1)
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"x: ", *[b"a" * 60_000] * 20],
        [HEAD, *[b"".join(b"x-%d: y\r\n" % n for n in range(5000))] * 20],
        [b"GET /" + b"a" * 60_000, *[b"a" * 60_000] * 20],
    ],
    ids=["one long header", "many headers", "a long path"],
)
async def test_heads_are_bounded(setup, pieces):
    answer = await raw(setup.gateway.address, *pieces)
    assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) or answer == b"reset"


async def test_heads_that_never_end_are_not_waited_for(setup, monkeypatch):
    monkeypatch.setattr("penstock.gateway.door.protocol.HEAD_S", 0.05)
    for begun in (b"", HEAD):
        assert (await raw(setup.gateway.address, begun)).startswith(b"HTTP/1.1 408")


CHUNKED = b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
TRAILERS = b"".join(b"x-%d: y\r\n" % n for n in range(5000))


@pytest.mark.parametrize("path", [b"GET /healthz", f"POST {CHAT}".encode()])
@pytest.mark.parametrize(
    "tail",
    [[b"0\r\n", *[TRAILERS] * 40], [b"0\r\nx: ", *[b"a" * 60_000] * 40], [b"5;x=", *[b"a" * 60_000] * 40]],
    ids=["many trailers", "one long trailer", "a long extension of a chunk"],
)
async def test_what_is_no_body_is_bounded_behind_the_head_too(setup, path, tail):
    connection = await asyncio.open_connection(*setup.gateway.address.split(":"))
    reader, writer = connection
    try:
        for piece in [path + CHUNKED, *tail]:
            writer.write(piece)
            await writer.drain()
    except ConnectionResetError:
        pass
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            await reader.read(-1)  # ends: the gateway has closed the connection
    writer.close()
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        assert (await client.get("/healthz")).status_code == 200


async def test_bodies_in_tiny_chunks_are_served(setup):
    """One byte in each chunk, six on the wire: more around the body than a head may have, and nothing wrong."""
    body = json.dumps(chat(messages=[{"role": "user", "content": "x" * 20_000}])).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    answer = await raw(setup.gateway.address, head, chunks[:100_000], chunks[100_000:] + b"0\r\nx-sum: 1\r\n\r\n")
    assert b"context_length_exceeded" in answer


@pytest.mark.parametrize("tail", [b"0\r\nx-sum: ", b"5\r\nab", b""])
async def test_messages_that_never_end_are_not_waited_for(setup, monkeypatch, tail):
    monkeypatch.setattr("penstock.gateway.door.protocol.MESSAGE_S", 0.1)
    connection = await raw(setup.gateway.address, b"GET /healthz" + CHUNKED + tail)
    assert connection.startswith((b"HTTP/1.1 200", b"HTTP/1.1 408"))  # and then it ends


async def test_a_running_stream_outlives_the_time_of_a_message_that_waits_behind_it(setup, monkeypatch):
    """A second request with a long body on the same connection is not read meanwhile; its client is not to blame."""
    monkeypatch.setattr("penstock.gateway.door.protocol.MESSAGE_S", 0.1)
    setup.script.hang = True
    reader, writer = await asyncio.open_connection(*setup.gateway.address.split(":"))
    body = json.dumps(chat(stream=True)).encode()
    first = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    writer.write(first + HEAD + b"content-length: 1000000\r\n\r\n" + b" " * 500_000)
    await reader.readuntil(b"data: ")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await reader.readuntil(b"HTTP/1.1 408")
    setup.script.gate.set()
    await reader.readuntil(b"[DONE]")
    writer.close()
    await setup.gateway.reception.admission.idle()


PAGES = 400
"""So many times the API's description is more than the buffers of a connection hold."""


async def unread(address: str) -> socket.socket:
    """A connection whose client has asked for much and reads nothing."""
    host, port = address.split(":")
    made = socket.socket()
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, (host, int(port)))
    await loop.sock_sendall(made, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * PAGES)
    return made


async def test_who_does_not_read_is_not_waited_for(setup, monkeypatch):
    monkeypatch.setattr("penstock.gateway.door.protocol.STALL_S", 0.1)
    with await unread(setup.gateway.address) as made:
        ours = made.getsockname()
        async with asyncio.timeout(10):
            while any(one.raddr == ours for one in psutil.Process().net_connections()):
                await asyncio.sleep(0.02)  # until the gateway has closed it


async def test_who_reads_slowly_gets_all_of_it(setup, monkeypatch):
    monkeypatch.setattr("penstock.gateway.door.protocol.STALL_S", 1.0)
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        size = len((await client.get("/openapi.json")).content)
    loop, read = asyncio.get_running_loop(), 0
    began = loop.time()
    with await unread(setup.gateway.address) as made:
        while read < PAGES * size * 0.99:
            read += len(piece := await loop.sock_recv(made, 1 << 16))
            assert piece, f"closed after {read} bytes"
            if loop.time() - began < 1.5:
                await asyncio.sleep(0.02)  # the client's own pace


def test_a_line_for_many_alike():
    class Clock:
        now = 100.0

        def time(self) -> float:
            return self.now

    clock = Clock()
    sparse = Sparse(clock)

    def kept(level: int, text: str) -> bool:
        return sparse.filter(logging.LogRecord("uvicorn.error", level, "", 0, text, None, None))

    assert [kept(logging.WARNING, "invalid") for _ in range(3)] == [True, False, False]
    assert kept(logging.WARNING, "other") and kept(logging.ERROR, "invalid")
    clock.now += 11
    assert kept(logging.WARNING, "invalid")


async def test_no_http(setup):
    assert (await raw(setup.gateway.address, b"\x16\x03\x01\x00\xff nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("text", ["\\ud800", "\\ud800\\u0041", "\\udc00"])
async def test_half_characters(setup, post, text):
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "{text}"}}]}}'
    assert (await post(CHAT, body.encode())).status_code == 400


@pytest.mark.parametrize(
    "text", ["", "\x00", "\ufdd0\ufdd0", "\U0010ffff", "a\u0300" * 50, "<|im_end|>" * 9, "{{ 7*7 }}"]
)
async def test_odd_text_is_only_text(setup, post, text):
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {"a": text}}}]
    calls = [{"id": text, "type": "function", "function": {"name": text, "arguments": text}}]
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text, "name": text},
        {"role": "assistant", "content": text, "tool_calls": calls},
        {"role": "tool", "content": text, "tool_call_id": text},
    ]
    answer = await post(CHAT, chat(messages=messages, tools=tools, prompt_cache_key=text, user=text))
    assert answer.status_code == 200, answer.text
    ids = list(setup.mesh.prefills[0].requests[-1].prompt_ids)
    assert ids.count(setup.tokenizer.token_to_id("<|im_end|>")) == 4
    assert "49" not in setup.tokenizer.decode(ids)
