"""What a server says of itself before it is loaded, and what can't be loaded."""

from __future__ import annotations

import socket

import pytest
from tests.tools.load.chat_server import CONTEXT, OVERHEAD, TOKENS_PER_WORD, TOOL, serving
from tests.tools.load.support import BLOCK, plan, play, single, target

from penstock.load.conversation import SessionPrompts
from penstock.load.errors import LoadError
from penstock.load.target import calibrated, parsed, served
from penstock.traces.reading import RecordedAsk


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8080", ("127.0.0.1", 8080, False, "/v1")),
        ("127.0.0.1:8080", ("127.0.0.1", 8080, False, "/v1")),
        ("https://example.org/openai/v2/", ("example.org", 443, True, "/openai/v2")),
        ("http://host", ("host", 80, False, "/v1")),
        ("http://[::1]:8080", ("::1", 8080, False, "/v1")),
    ],
)
def test_urls(url: str, found: tuple[str, int, bool, str]) -> None:
    assert parsed(url) == found


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:0", "http://x:99999", "http://me:secret@x", ""])
def test_bad_urls_are_named(url: str) -> None:
    with pytest.raises(LoadError, match="--url must be that of a server"):
        parsed(url)


async def test_the_model_and_its_context() -> None:
    async with serving() as server:
        found = await served(target(server.url))
        assert (found.name, found.context) == ("fake", CONTEXT)
        with pytest.raises(LoadError, match="--model must be one of fake, not 'other'"):
            await served(target(server.url, model="other"))


async def test_text_is_as_long_as_planned_for_the_servers_model() -> None:
    """The server counts two tokens a word; what it says of its probes is all that the client knows of that."""
    async with serving() as server:
        wording = await calibrated(target(server.url), CONTEXT, "salt")
        assert wording.words_per_token == pytest.approx(1 / TOKENS_PER_WORD)
        assert wording.tool_tokens == TOOL
        [session] = plan(single(0.0, *(f"{number}" for number in range(100)))).sessions
        body = {"messages": SessionPrompts(session, wording, tools=False).messages(0)}
        assert server.length(body) == 100 * BLOCK + OVERHEAD
        assert server.asked == [], "probes are no part of the load"


async def test_a_server_that_does_not_tell_its_model_of_tools_gets_them_as_text() -> None:
    async with serving() as server:
        server.knows_tools = False
        wording = await calibrated(target(server.url), CONTEXT, "salt")
        assert wording.tool_tokens is None
        asks = [
            RecordedAsk(0.0, 204, 2, tuple(bytes([n]) * 32 for n in (*range(50), own)), f"{own}", tools=100)
            for own in (90, 91)
        ]
        session = plan(*asks).sessions[0]
        talk = SessionPrompts(session, wording, tools=True)
        assert talk.tools(0) == []
        assert server.length({"messages": talk.messages(0)}) == 204 + OVERHEAD


async def test_what_can_not_be_reached_is_said() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(LoadError, match=f"{url}/v1 can't be reached"):
            await served(target(url))
    async with serving() as server:
        with pytest.raises(LoadError, match="can't be loaded: status 404"):
            await served(target(f"{server.url}/elsewhere"))


async def test_calls_are_required_where_the_trace_has_one_and_that_is_wanted() -> None:
    keys = tuple(bytes([number]) * 32 for number in range(50))
    asks = [
        RecordedAsk(0.0, 204, 8, (*keys, bytes([own]) * 32), f"{own}", took=1.0, tools=100, calls_tool=own == 90)
        for own in (90, 91)
    ]
    async with serving() as server:
        await play(server.url, plan(*asks), more={"tools": "required"})
        forced, free = sorted(server.asked, key=lambda body: body["tool_choice"], reverse=True)
        assert (forced["tool_choice"], free["tool_choice"]) == ("required", "auto")
        assert "ignore_eos" not in forced and forced["max_tokens"] > 8
        assert free["ignore_eos"] is True and free["max_tokens"] == 8
        assert forced["tools"] == free["tools"]
        await play(server.url, plan(*asks), more={"tools": "none"})
        assert "tools" not in server.asked[-1] and "tool_choice" not in server.asked[-1]
