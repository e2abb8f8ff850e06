"""HTTP as clients, browsers and load balancers use it."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib

import httpx2
import pytest

from penstock.testing.keys import key_file

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://chat.example"


@pytest.fixture
async def http(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/v1/models", "/v1/models/tiny", "/metrics"])
async def test_get_and_head(http, path):
    for slash in ("", "/", "//"):
        answer = await http.get(path + slash)
        head = await http.head(path + slash)
        assert answer.status_code == head.status_code == 200
        assert head.content == b"" and answer.content
        assert head.headers["content-type"] == answer.headers["content-type"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/models", "/health", "/nowhere"])
async def test_options_are_answered(http, path):
    answer = await http.options(path)
    assert answer.status_code == 204
    assert "POST" in answer.headers["allow"]
    assert "access-control-allow-origin" not in answer.headers


async def test_health_is_what_load_balancers_expect(setup, http):
    assert (await http.get("/health")).json() == {"status": "ok"}
    setup.mesh.set_view(ready=False)
    await setup.gateway.view.until(False)
    try:
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200
    finally:
        setup.mesh.set_view(ready=True)
        await setup.gateway.view.until(True)


@pytest.mark.parametrize("path", [CHAT, CHAT + "/"])
async def test_a_slash_at_the_end_is_the_same_route(http, path):
    answer = await http.post(path, json=HELLO)
    assert answer.status_code == 200 and not answer.history


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere", CHAT, "/v1/sessions/hint", "/metrics"])
async def test_every_answer_has_the_id_of_its_request(http, method, path):
    answer = await http.request(method, path, headers={"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    drawn = (await http.request(method, path, headers={"x-request-id": "not an id"})).headers["x-request-id"]
    assert drawn.startswith("req-")


async def test_compressed_bodies(http):
    raw = json.dumps(HELLO).encode()
    for encoding in ("gzip", "x-gzip", "GZIP"):
        answer = await http.post(CHAT, content=gzip.compress(raw), headers={"content-encoding": encoding})
        assert answer.status_code == 200, answer.text
    assert (await http.post(CHAT, content=raw, headers={"content-encoding": "identity"})).status_code == 200


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "nonsense"])
async def test_other_encodings_are_named(http, encoding):
    answer = await http.post(CHAT, content=b"x", headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")


@pytest.mark.parametrize("body", [b"{}", gzip.compress(b"x" * 1000, mtime=0)[:-9], b"", zlib.compress(b"{}")])
async def test_what_is_no_gzip_is_named(http, body):
    answer = await http.post(CHAT, content=body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-encoding")


async def test_a_bomb_is_refused_before_it_has_burst(opened):
    """A gigabyte in one megabyte: as large as a body may be is as far as it is decoded, and nobody waits for it."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1000)) + packer.flush()
    async with opened(max_body_bytes=2_000_000) as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        began = time.perf_counter()
        answer = await client.post(CHAT, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 413
        assert time.perf_counter() - began < 1.0
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


def asked(origin: str, method: str = "POST", headers: str = "authorization, content-type") -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}


async def test_pages_may_use_the_gateway_when_a_setting_says_so(opened):
    async with (
        opened(cors_origins=(PAGE, "http://localhost:3000")) as setup,
        httpx2.AsyncClient(base_url=setup.url) as client,
    ):
        before = await client.options(CHAT, headers=asked(PAGE))
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == PAGE
        assert before.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in before.headers["access-control-allow-methods"]
        for stream in (False, True):
            answer = await client.post(CHAT, json={**HELLO, "stream": stream}, headers={"origin": PAGE})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "origin" in answer.headers["vary"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        wrong = await client.post(CHAT, json={}, headers={"origin": PAGE})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, PAGE)
        other = await client.options(CHAT, headers=asked("https://evil.example"))
        assert "access-control-allow-origin" not in other.headers


async def test_all_pages_by_a_star(opened):
    async with opened(cors_origins=("*",)) as setup, httpx2.AsyncClient(base_url=setup.url) as client:
        answer = await client.post(CHAT, json=HELLO, headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "https://any.example"


@pytest.mark.parametrize(
    "origin", [PAGE, "null", "http://127.0.0.1:1", "http://evil.example:{port}", "file://", "http://["]
)
async def test_without_keys_a_foreign_page_starts_nothing(setup, http, origin):
    """A browser sends such a request without asking first when its body is text/plain."""
    port = setup.url.rpartition(":")[2]
    headers = {"origin": origin.format(port=port), "content-type": "text/plain"}
    if "evil" in origin:  # a name that resolves to this machine
        headers["host"] = f"evil.example:{port}"
    answer = await http.post(CHAT, content=json.dumps(HELLO), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert "x-request-id" in answer.headers
    assert setup.mesh.router.asks == []
    own = {"origin": setup.url}
    assert (await http.post(CHAT, json=HELLO, headers=own)).status_code == 200
    assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_with_keys_a_page_needs_one(opened, tmp_path):
    keys = key_file(tmp_path / "keys.json", {"k": "a"})
    async with (
        opened(api_keys=keys, server_key="00" * 16, api_key="k") as setup,
        httpx2.AsyncClient(base_url=setup.url) as client,
    ):
        assert (await client.post(CHAT, json=HELLO, headers={"origin": PAGE})).status_code == 401
        headers = {"origin": PAGE, "authorization": "Bearer k"}
        assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200


async def test_keep_alive(setup):
    host, _, port = setup.gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(3):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(3) == b"ok\n"
    writer.close()
