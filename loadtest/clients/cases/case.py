"""What the case files share. It stands on nothing: each client runs it in an environment of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import traceback
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

URL = os.environ["PENSTOCK_URL"]
"""Of the gateway, without /v1."""
MODEL = os.environ["PENSTOCK_MODEL"]
MODEL_DIR = os.environ.get("PENSTOCK_MODEL_DIR", "")
"""Where the model's tokenizer is."""
KEY = "none"
City = Literal["Oslo", "Bergen"]
"""A list, since a small model fills an open string to the limit."""
LIMIT_S = 120.0
WEATHER = "What is the weather in Oslo?"
HISTORY = f"Conversation {uuid.uuid4()}. " + "It rained in Oslo, and the harbour was quiet. " * 20
"""What a first turn says, so that the second finds something cached."""
SESSION = {"x-session-affinity": str(uuid.uuid4())}
ENDLESS = {"ignore_eos": True}
"""What a body of Chat Completions has whose answer would go on for much longer than a client needs to leave."""
ENDLESS_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 7000}},
    "required": ["text"],
    "additionalProperties": False,
}
"""Of an answer that does, for APIs without such a field."""
GONE_S = 1.0
"""Within this the gateway has ended the request of a client that has left."""

_CASES: list[tuple[str, Callable[[], Any]]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that raises when the client does not work; its name is a column of the table."""
    _CASES.append((function.__name__, function))
    return function


@asynccontextmanager
async def leaving(requests: int = 1) -> AsyncIterator[None]:
    """In the block the client begins so many requests and leaves them. Behind it the gateway runs none, and says that
    they were cancelled: none has come to its own end. The one that reads its metrics is no client that was tried."""
    before = (await _figures())[1]
    yield
    late = time.monotonic() + GONE_S
    while (found := await _figures()) != (0, before + requests):
        live, cancelled = found
        said = f"{GONE_S:g} s later {live:g} requests are live and {cancelled - before:g} of {requests} cancelled"
        assert time.monotonic() < late, said
        await asyncio.sleep(0.02)


async def begun() -> None:
    """Returns when a request is live."""
    while not (await _figures())[0]:
        await asyncio.sleep(0.02)


def counted() -> tuple[float, float]:
    """Tokens of the prompts and of the answers of all requests so far, as the gateway counts them."""
    return _read("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{")


async def _figures() -> tuple[float, float]:
    """The requests that the gateway runs, and those that ended because their clients left."""
    names = ("penstock_requests_live ", 'penstock_requests_total{outcome="cancelled"} ')
    return await asyncio.to_thread(_read, *names)


def _read(first: str, second: str) -> tuple[float, float]:
    """Two sums of the gateway's metrics, of lines that begin so."""
    lines = urllib.request.urlopen(f"{URL}/metrics").read().decode().splitlines()
    one, other = (sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in (first, second))
    return one, other


def report(**versions: str) -> None:
    """Runs all cases and prints one JSON object."""
    asyncio.run(_report(versions))


async def _report(versions: dict[str, str]) -> None:
    found: dict[str, Any] = {}
    for name, function in _CASES:
        try:
            async with asyncio.timeout(LIMIT_S):
                if inspect.iscoroutinefunction(function):
                    await function()
                else:
                    await asyncio.to_thread(function)
            found[name] = "ok"
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found[name] = f"{type(error).__name__}: {str(error)[:400]} ({last.filename.split('/')[-1]}:{last.lineno})"
    print(json.dumps({"versions": versions, "cases": found}))
