"""What the case files share. It stands on nothing: each client runs it in an environment of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
import uuid
from collections.abc import Callable
from typing import Any, Literal

URL = os.environ["PENSTOCK_URL"]
"""Of the gateway, without /v1."""
MODEL = os.environ["PENSTOCK_MODEL"]
KEY = "none"
City = Literal["Oslo", "Bergen"]
"""A list, since a small model fills an open string to the limit."""
LIMIT_S = 120.0
WEATHER = "What is the weather in Oslo?"
HISTORY = f"Conversation {uuid.uuid4()}. " + "It rained in Oslo, and the harbour was quiet. " * 20
"""What a first turn says, so that the second finds something cached."""
SESSION = {"x-session-affinity": str(uuid.uuid4())}

_CASES: list[tuple[str, Callable[[], Any]]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that raises when the client does not work; its name is a column of the table."""
    _CASES.append((function.__name__, function))
    return function


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
