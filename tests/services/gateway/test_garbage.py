"""A request that is over leaves nothing to the garbage collector, whose full rounds are rare and hold the loop."""

from __future__ import annotations

import gc

import httpx2
import pytest

_REQUESTS = 5
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 20}
CASES = [
    ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/chat/completions", {**CHAT, "n": 2, "stop": ["xyz"]}, 200),
    ("/v1/chat/completions", {**CHAT, "unknown": 1}, 400),
    ("/v1/completions", {**TEXT, "stream": True}, 200),
    ("/v1/completions", {**TEXT, "prompt": "word " * 9000}, 400),
    ("/v1/responses", {"model": "tiny", "input": "hi", "stream": True}, 200),
    ("/v1/messages", {**CHAT, "stream": True}, 200),
]


@pytest.mark.parametrize(("path", "body", "status"), CASES)
async def test_nothing_of_a_request_waits_for_the_collector(setup, path, body, status):
    setup.says("the quick fox " * 5)
    async with httpx2.AsyncClient(base_url=setup.url, timeout=60) as client:

        async def ask() -> None:
            async with client.stream("POST", path, json=body) as answer:
                assert answer.status_code == status
                _ = [piece async for piece in answer.aiter_raw()]

        for _ in range(2):  # a round has generators of tests before closed, the one after it frees them
            await ask()
            await setup.mesh.until(lambda: not setup.mesh.router.live)
            gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(_REQUESTS):
                await ask()
            await setup.mesh.until(lambda: not setup.mesh.router.live)
            gc.collect()
            ours = [type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("penstock.gateway")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert ours == []
