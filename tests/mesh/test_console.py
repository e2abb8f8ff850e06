"""The console over a mesh that serves: its endpoints, and its page in a real Chromium."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from openai import AsyncOpenAI

from penstock.runtime.drafts import PROPOSERS
from penstock.testing.keys import key_file
from penstock.testing.mesh import MeshSetup
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

from .support import DRAFTING

MODELS = Path(__file__).parents[2] / "libs/penstock/models"
AXE = Path(__file__).parents[2] / "runs/axe"
KEYS = {"api_keys": None, "server_key": "ab" * 16}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
SECRET = "Remember that the password is mellon"
OPERATOR = {"x-api-key": "key-op"}


@pytest.fixture(scope="module")
async def mesh(meshes, tmp_path_factory):
    """Two tenants and an operator; drafts of a model, of a lookup and of grammars."""
    file = key_file(tmp_path_factory.mktemp("keys") / "keys.json", {"key-a": "a", "key-b": "b"}, operators=["key-op"])
    setup = MeshSetup(
        model=MODELS / "penstock-mini",
        draft=str(MODELS / "penstock-mini-draft"),
        model_name="mini",
        engine={name: said for name, said in DRAFTING.items() if name != "lookup_tokens"},
        gateway={"api_keys": file, "server_key": "ab" * 16},
    )
    async with meshes(setup) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def client(mesh):
    """Of tenant a, once the draft service drafts."""
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="key-a", timeout=60) as client:
        async with asyncio.timeout(30):
            while not (await chat(client)).usage.penstock["drafts"]["verified"]["model"]:
                pass  # requests do not wait for the draft's stream
        yield client


async def chat(client, content="Tell me of the sea.", proposers=True, **more):
    body = {"model": "mini", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    return await client.chat.completions.create(**body | more, extra_body={"penstock": {"proposers": proposers}})


@pytest.mark.parametrize(
    "more", [{}, {"response_format": SCHEMA}, {"logprobs": True}], ids=["text", "json", "logprobs"]
)
async def test_every_token_says_who_proposed_it(client, more):
    whole = await chat(client, **more)
    said, usage = whole.choices[0].proposers, whole.usage
    assert len(said) == usage.completion_tokens and set(said) <= {None, *PROPOSERS}
    told = Counter(one for one in said if one is not None)
    assert told == Counter({name: right for name, right in usage.penstock["drafts"]["accepted"].items() if right})
    assert sum(told.values()) == usage.penstock["accepted_tokens"] > 0
    assert "response_format" not in more or told["grammar"] > 0
    plain = await chat(client, proposers=False, **more)
    assert plain.choices[0].message.content == whole.choices[0].message.content
    assert not hasattr(plain.choices[0], "proposers")


async def test_streams_say_it_too(client):
    streamed, texts, usage = [], [], None
    async for chunk in await chat(client, stream=True, logprobs=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                assert len(choice.proposers) == len(choice.logprobs.content), "each chunk says it of its own tokens"
                streamed += choice.proposers
                texts += [bytes(token.bytes) for token in choice.logprobs.content]
        usage = chunk.usage or usage
    assert len(streamed) == usage.completion_tokens
    told = Counter(one for one in streamed if one is not None)
    assert sum(told.values()) == usage.penstock["accepted_tokens"]
    assert {name: told[name] for name in PROPOSERS} == usage.penstock["drafts"]["accepted"]


async def test_completions_say_it_of_each_prompt(client):
    answer = await client.completions.create(
        model="mini",
        prompt=["Once upon a time", "The sea is"],
        max_tokens=16,
        temperature=0,
        extra_body={"penstock": {"proposers": True}},
    )
    said = [one for choice in answer.choices for one in choice.proposers]
    assert len(answer.choices) == 2 and len(said) == answer.usage.completion_tokens
    assert sum(one is not None for one in said) == answer.usage.penstock["accepted_tokens"]


async def test_grpc_says_it_too(mesh, client):
    request = gateway_pb2.ChatCompletionRequest(
        model="mini",
        messages=[gateway_pb2.ChatMessage(role="user", content="Tell me of the sea.")],
        temperature=0,
        max_completion_tokens=32,
        proposers=True,
    )
    async with grpc.aio.insecure_channel(mesh.gateway.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(request, metadata=(("x-api-key", "key-a"),))
        chunks = [chunk async for chunk in call]
    said = [one for chunk in chunks for one in chunk.proposers]
    assert len(said) == chunks[-1].usage.completion_tokens
    assert sum(one != "" for one in said) == chunks[-1].usage.accepted_tokens > 0


async def test_endpoints_say_what_ctl_says(mesh, client, http):
    headers = {"x-session-affinity": "console", "x-request-id": "console-1"}
    answer = await client.chat.completions.with_raw_response.create(
        model="mini", messages=[{"role": "user", "content": SECRET}], max_tokens=8, extra_headers=headers
    )
    used = answer.parse().usage

    async def got(path):
        answer = await http.get(f"{mesh.url}/console/api/{path}", headers=OPERATOR)
        assert answer.status_code == 200, answer.text
        assert SECRET not in answer.text and "mellon" not in answer.text
        return answer.json()

    top = await got("top")
    assert {one["role"] for one in top["workers"]} == {"prefill", "decode"} and len(top["stores"]) == 1
    assert top["gateways"][0]["http_address"] == str(mesh.gateway.address)
    sessions = (await got("sessions"))["sessions"]
    assert [(one["tenant"], one["model"], one["requests"]) for one in sessions[:1]] == [("a", "mini", 1)]
    assert sessions[0]["prompt_tokens"] == used.prompt_tokens
    newest = (await got("requests"))["requests"][0]
    assert (newest["request_id"], newest["tenant"], newest["status"]) == ("console-1", "a", "completed")
    assert newest["tokens"]["prompt"] == used.prompt_tokens
    found = await got("requests/console-1")
    [attempt] = found["request"]["choices"][0]["attempts"]
    [chosen, *_] = found["plans"][attempt["plan"]]["options"]
    assert found["members"][chosen["decode"]] == mesh.decode[0].address
    for key, status in (("key-a", 403), ("key-b", 403), ("none", 401)):
        for path in ("top", "sessions", "requests", "requests/console-1"):
            refused = await http.get(f"{mesh.url}/console/api/{path}", headers={"x-api-key": key})
            assert refused.status_code == status and "console-1" not in refused.text


# The page. Its tests want a browser.


@pytest.fixture(scope="module")
async def browser():
    driven = pytest.importorskip("penstock.testing.browser", reason="playwright is not installed", exc_type=ImportError)
    executable = driven.chromium()
    if executable is None:
        pytest.skip("Chromium is not on this machine: apt-get install chromium")
    async with driven.open_browser(executable) as browser:
        yield driven, browser


@asynccontextmanager
async def page_of(browser, mesh, **options):
    """The console, which must have no fault when the block ends: no error, nothing that its policy forbids."""
    driven, chromium = browser
    faults: list[str] = []
    async with driven.console_page(chromium, mesh.url, **options) as page:
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda asked: None if asked.url.startswith(mesh.url) else faults.append(asked.url))
        page.set_default_timeout(30_000)
        await page.reload()  # with all that listens
        yield page
    assert faults == []


async def chatting(page):
    """Opens the playground with a client's key."""
    await page.click('#views a[href="#/playground"]')
    await page.fill("#client-key", "key-a")
    await page.press("#client-key", "Tab")
    await page.wait_for_selector("#model option", state="attached")
    await page.select_option("#format", "json")


async def said(page, turn):
    """Says something, and gives the usage of the answer, which is the model's turn of that number."""
    await page.fill("#words", "Where shall we go, and for how long?")
    async with page.expect_response("**/v1/chat/completions") as answered:
        await page.press("#words", "Enter")
    await page.wait_for_selector(f".turn.model >> nth={turn - 1} >> .cost .quiet")
    text = (await (await answered.value).body()).decode()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")][-1]["usage"]


async def test_axe_finds_nothing(mesh, client, browser):
    driven, chromium = browser
    axe = await asyncio.to_thread(driven.axe_source, AXE)
    if axe is None:
        pytest.skip("npm can't install axe-core")
    await client.chat.completions.create(
        model="mini",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        extra_headers={"x-session-affinity": "axe"},
    )
    found = await driven.console_violations(chromium, mesh.url, axe, key="key-op")
    async with page_of(browser, mesh, key="key-op") as page:
        await chatting(page)
        await said(page, 1)
        found["playground with an answer"] = await driven.axe_violations(page, axe)
    assert (
        len(found) == 2 * 2 * len(driven.VIEWS) + 1 and {view: faults for view, faults in found.items() if faults} == {}
    )
    async with page_of(browser, mesh) as page:
        await page.wait_for_selector("#key")
        assert await driven.axe_violations(page, axe) == [], "nor in the form that asks for the key"


async def test_the_key_is_asked_for_and_stays_in_the_tab(mesh, browser):
    async with page_of(browser, mesh, key="key-a") as page:
        await page.wait_for_selector("text=an operator's key may do that")
        await page.fill("#key", "key-op")
        await page.press("#key", "Enter")
        await page.wait_for_selector("tbody tr")
        kept = await page.evaluate("[location.href, document.cookie, localStorage.length, sessionStorage.length]")
        assert kept == [f"{mesh.url}/console", "", 0, 1]
        await page.reload()
        await page.wait_for_selector("tbody tr")
        await page.click("#leave")
        await page.wait_for_selector("#key")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_a_request_is_opened_by_its_id(mesh, client, browser):
    driven, _ = browser
    answer = await chat(client, extra_headers={"x-request-id": "by-its-id"})
    async with page_of(browser, mesh, key="key-op") as page:
        for wanted in ("by-its-id", answer.id):
            await driven.visit(page, "requests")
            await page.fill("#wanted", wanted)
            await page.press("#wanted", "Enter")
            await page.wait_for_selector("h1:has-text('by-its-id')")
            assert await page.locator(".waterfall .span").count() == 10
        await driven.visit(page, "requests")
        await page.fill("#wanted", "nobody")
        await page.press("#wanted", "Enter")
        await page.wait_for_selector("text=is not known here")


REACHABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"
UNREACHED = """([wanted, reached]) => [...document.querySelectorAll(wanted)]
  .filter((one) => one.checkVisibility() && !one.disabled && !(one.type === 'radio' && !one.checked))
  .filter((one) => !one.dataset.reached).map((one) => one.outerHTML.slice(0, 120))"""
MARK = "document.activeElement !== document.body && (document.activeElement.dataset.reached = '1') && undefined"


@pytest.mark.parametrize("view", ["mesh", "sessions", "requests", "request", "playground"])
async def test_the_keyboard_reaches_everything(mesh, client, browser, view):
    driven, _ = browser
    async with page_of(browser, mesh, key="key-op") as page:
        await driven.visit(page, view)
        await page.evaluate("document.activeElement.blur()")
        for _ in range(2 * await page.locator(REACHABLE).count() + 4):
            await page.keyboard.press("Tab")
            await page.evaluate(MARK)
        assert await page.evaluate(UNREACHED, [REACHABLE, None]) == []


async def test_what_flows_is_shown_and_stands_still_on_request(mesh, client, browser):
    async def load():
        while True:
            await chat(client, proposers=False)

    running = asyncio.ensure_future(load())
    try:
        for still, animation in ((False, "flow"), (True, "none")):
            async with page_of(browser, mesh, key="key-op", still=still) as page:
                await page.wait_for_selector(".edge.tokens .flow", state="attached")
                shown = await page.evaluate("getComputedStyle(document.querySelector('.flow')).animationName")
                assert shown == animation
                assert "tokens generated per second" in await page.get_attribute(".picture svg", "aria-label")
    finally:
        running.cancel()


async def test_the_playground_colours_tokens_as_usage_counts_them(mesh, client, browser):
    async with page_of(browser, mesh, key="key-op") as page:
        await chatting(page)
        for turn in (1, 2):
            usage = await said(page, turn)
            shown = page.locator(f".turn.model >> nth={turn - 1}")
            for name, accepted in usage["penstock"]["drafts"]["accepted"].items():
                assert await shown.locator(f".answer .t.{name}").count() == accepted, name
            assert await shown.locator(".answer .t").count() == usage["completion_tokens"]
            if await shown.locator(".prompt").count():  # else the session's own tokens were used
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert await shown.locator(".prompt .t.cached").count() == cached
                assert await shown.locator(".prompt .t").count() == usage["prompt_tokens"]
        assert await page.locator(".answer .t.grammar").count() > 0


async def test_a_page_out_of_sight_asks_nothing(mesh, browser):
    async with page_of(browser, mesh, key="key-op") as page:
        await page.wait_for_selector("tbody tr")
        asked = []
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.evaluate(hide % "true" + tell)
        await page.clock.install()
        page.on("request", lambda request: asked.append(request.url))
        await page.clock.run_for(60_000)
        assert asked == []
        async with page.expect_request("**/console/api/top"):
            await page.evaluate(hide % "false" + tell)
