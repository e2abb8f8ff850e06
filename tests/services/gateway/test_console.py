"""The console's page and endpoints: what is served, to whom, and what of it."""

from __future__ import annotations

import re

import httpx2
import pytest

from penstock.gateway.console.files import HEADERS, PAGE, page_files
from penstock.gateway.mesh.shown import FRESH_S, Lately
from penstock.testing.keys import key_file

from .test_keys import SERVER_KEY

API = ["/console/api/top", "/console/api/sessions", "/console/api/requests", "/console/api/requests/x"]
OPEN = ["/console", "/console/files/main.js", "/console/files/console.css"]
SECRET = "nobody but its tenant reads this prompt"


@pytest.fixture
async def client(setup):
    async with httpx2.AsyncClient(base_url=setup.url) as client:
        yield client


def named(name: str, text: str) -> set[str]:
    """The files that a file of the page loads."""
    if name.endswith(".html"):
        return set(re.findall(r'(?:src|href)="/console/files/([^"]+)"', text))
    return set(re.findall(r'from "\./([^"]+)"', text)) if name.endswith(".js") else set()


async def test_all_that_the_page_loads_is_served(client):
    waiting, seen = {PAGE}, set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        answer = await client.get("/console" if name == PAGE else f"/console/files/{name}")
        assert answer.status_code == 200 and answer.content == page_files()[name].body
        assert answer.headers["content-type"] == page_files()[name].kind
        assert {header: answer.headers[header] for header in HEADERS} == dict(HEADERS)
        again = await client.get(str(answer.url), headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        waiting |= named(name, answer.text) - seen
    assert {"main.js", "uPlot.esm.js", "console.css", "icon.svg"} < seen
    assert seen >= {name for name in page_files() if name.endswith(".js")}, "nothing lies there that nobody loads"
    assert "MIT License" in (await client.get("/console/files/uPlot.LICENSE.txt")).text
    for odd in ("none.js", "..%2Ffiles.py", "%2e%2e%2ffiles.py"):
        assert (await client.get(f"/console/files/{odd}")).status_code == 404


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    page = page_files()[PAGE].body.decode()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    for name, file in page_files().items():
        if not name.startswith("uPlot"):
            found = set(re.findall(r"https?://[^\"'\s)]+", file.body.decode()))
            assert found <= {"http://www.w3.org/2000/svg"}, name


async def test_figures_are_for_operators(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"right": "a"}, operators=["ops"])
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            for path in OPEN:
                assert (await http.get(path)).status_code == 200
            for path in API:
                for headers, status in (({}, 401), ({"x-api-key": "wrong"}, 401), ({"x-api-key": "right"}, 403)):
                    answer = await http.get(path, headers=headers)
                    assert answer.status_code == status, (path, headers)
                    assert answer.json()["error"]["message"]
            headers = {"authorization": "Bearer ops"}
            assert (await http.get("/console/api/requests", headers=headers)).json() == {"requests": []}
            assert (await http.get("/console/api/requests/x", headers=headers)).status_code == 404
            assert (await http.get("/console", headers={"host": "mesh.example"})).status_code == 200, "keys guard it"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "rebound.example"}, "foreign_host"),
        ({"host": "rebound.example:8080"}, "foreign_host"),
        ({"host": "127.0.0.1.example"}, "foreign_host"),
        ({"host": "[::1"}, "foreign_host"),
        ({"host": ""}, "foreign_host"),
        ({"origin": "https://other.example"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"origin": "http://127.0.0.1:1"}, "foreign_origin"),
        ({"sec-fetch-site": "cross-site"}, "foreign_origin"),
        ({"sec-fetch-site": "same-site"}, "foreign_origin"),
    ],
)
async def test_without_keys_other_sites_get_nothing(client, headers, code):
    for path in (*API, *OPEN) if code == "foreign_host" else API:
        answer = await client.get(path, headers=headers)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == code, path
    assert (await client.get("/console", headers={"sec-fetch-site": "cross-site"})).status_code == 200, "a link there"
    for fine in ({}, {"host": "localhost:8080"}, {"host": "[::1]:8080"}, {"sec-fetch-site": "same-origin"}):
        assert (await client.get("/console/api/requests", headers=fine)).status_code == 200


async def test_requests_of_all_without_a_word_of_them(opened, tmp_path):
    file = key_file(tmp_path / "keys.json", {"right": "a", "other": "b"}, operators=["ops"])
    async with opened(api_keys=file, server_key=SERVER_KEY) as setup:
        async with httpx2.AsyncClient(base_url=setup.url) as http:
            body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
            for number, key in enumerate(("right", "other")):
                headers = {"x-api-key": key, "x-request-id": f"r-{number}"}
                assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            headers = {"x-api-key": "right", "x-request-id": "r-2"}
            refused = await http.post("/v1/chat/completions", json={**body, "temperature": -1}, headers=headers)
            assert refused.status_code == 400
            answer = await http.get("/console/api/requests", headers={"x-api-key": "ops"})
    found = answer.json()["requests"]
    seen = [(one["request_id"], one["tenant"], one["status"]) for one in found]
    assert seen == [("r-2", "a", "refused"), ("r-1", "b", "completed"), ("r-0", "a", "completed")], "the newest first"
    assert found[0]["tokens"] is None and "temperature" in found[0]["error"]["message"]
    assert found[1]["tokens"]["prompt"] > 0 and found[1]["times"]["total"] > 0
    assert SECRET not in answer.text and answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["responses", "messages"])
async def test_apis_that_cannot_say_whose_tokens_are_refuse_to(client, path):
    body = {"model": "tiny", "penstock": {"proposers": True}, "max_tokens": 4, "input": "hi", "messages": []}
    wanted = {"responses": ("model", "penstock", "input"), "messages": ("model", "penstock", "messages", "max_tokens")}
    answer = await client.post(f"/v1/{path}", json={name: body[name] for name in wanted[path]})
    assert answer.status_code == 400 and "penstock" in answer.text and "proposers" in answer.text


async def test_a_router_is_asked_once_for_all_who_look():
    asked, now = [], 100.0

    async def ask() -> int:
        asked.append(now)
        return len(asked)

    lately = Lately(ask, clock=lambda: now)
    assert asked == [], "where nobody looks, nobody is asked"
    assert [await lately.get() for _ in range(5)] == [1] * 5
    now += FRESH_S
    assert await lately.get() == 2 and len(asked) == 2
