"""What a stream's events are as bytes: the short way of a plain text writes what the general way writes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.api.anthropic.api import MessagesApi
from penstock.gateway.api.inquiry import Api, Shape, Visit
from penstock.gateway.api.openai.api import CompletionApi
from penstock.gateway.api.openai.asks import chat_ask, completion_ask
from penstock.gateway.api.responses.api import ResponsesApi
from penstock.gateway.api.responses.store import MemoryResponses, StoreBounds
from penstock.gateway.completing.delta import CallDelta, Delta, TokenLogprob
from penstock.gateway.completing.usage import Usage

Value = TypeVar("Value")

MESSAGES = [{"role": "user", "content": "hi"}]
STORE = MemoryResponses(StoreBounds(tenant_count=1, tenant_bytes=1, count=1, bytes=1, ttl_s=1.0))
CHAT, TEXT = CompletionApi(chat_ask, 8), CompletionApi(completion_ask, 8)
APIS: dict[str, tuple[Api, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "chat with usage": (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    "chat with logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True}),
    "completion": (TEXT, {"prompt": "hi"}),
    "completion with logprobs": (TEXT, {"prompt": "hi", "logprobs": 0}),
    "message": (MessagesApi(), {"messages": MESSAGES, "max_tokens": 9}),
    "response": (ResponsesApi(STORE), {"input": "hi"}),
}
NAME = 'a "model" of 100 %s'


@st.composite
def grown(draw: st.DrawFn, choices: int) -> Delta:
    """Anything that a choice may gain before it ends; mostly a text."""
    delta = Delta(draw(st.integers(0, choices - 1)))
    for kind in draw(st.lists(st.sampled_from(["content"] * 5 + ["reasoning", "call", "logprob"]), max_size=3)):
        text = draw(st.text(min_size=1, max_size=5) | st.sampled_from(["%b", '"', "\\", "\n", "é%d"]))
        if kind == "call":
            delta.add_call(CallDelta(draw(st.integers(0, 1)), "call_1", "look", text))
        elif kind == "logprob":
            delta.add_logprob(TokenLogprob(text.encode(errors="replace"), -0.5, (), 0))
        else:
            delta.add_text(kind, text)  # type: ignore[arg-type]
    return delta


async def shapes(api: Api, body: dict[str, Any]) -> tuple[Shape, Shape]:
    """Two of the same request."""

    async def apart(work: Callable[[], Value], more: int = 0) -> Value:
        return work()

    inquiry = await api.read(json.dumps({"model": NAME, **body}).encode(), Visit("tenant", apart))
    return inquiry.shape("0" * 24, 1), inquiry.shape("0" * 24, 1)


def run(work: Awaitable[Value]) -> Value:
    """The value of work that waits for nothing."""
    with pytest.raises(StopIteration) as ended:
        work.__await__().send(None)  # type: ignore[attr-defined]
    return ended.value.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", APIS)
@given(data=st.data())
def test_the_short_way_writes_what_the_general_way_writes(name: str, data: st.DataObject) -> None:
    api, body = APIS[name]
    short, general = run(shapes(api, body))
    usage = Usage()
    assert short.begin(usage) == general.begin(usage)
    for delta in data.draw(st.lists(grown(2 if api in (CHAT, TEXT) else 1), max_size=12)):
        expected = api.style.written(general.events(delta))
        assert (short.text(delta) or api.style.written(short.events(delta))) == expected
    assert [event["type"] for event in short.end(usage) if "type" in event] == [
        event["type"] for event in general.end(usage) if "type" in event
    ]


@pytest.mark.parametrize("name", ["chat", "chat with usage", "completion", "message", "response"])
def test_a_plain_text_takes_the_short_way(name: str) -> None:
    api, body = APIS[name]
    shape, _ = run(shapes(api, body))
    shape.begin(Usage())
    assert shape.text(Delta(0, "a")) is None, "nothing has begun"
    shape.events(Delta(0, "a"))
    written = shape.text(Delta(0, "b"))
    assert written is not None and b'"b"' in written
    assert shape.text(Delta(0, "b", finish="stop")) is None
