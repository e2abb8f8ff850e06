"""Chat completions through the official client."""

from __future__ import annotations

import pytest

HELLO = [{"role": "user", "content": "hello"}]


async def test_whole(setup):
    answer = await setup.client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "The quick brown fox."
    assert answer.choices[0].finish_reason == "stop"


async def test_stream(setup):
    text, finish = "", []
    async for chunk in await setup.client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (text, finish) == ("The quick brown fox.", ["stop"])
