"""A router on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.services.router.helpers import Harness

from penstock.router.config import RouterConfig
from penstock.router.service import open_router
from penstock.rpc.channels import open_channels


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Harness]]]:
    """`await start(max_live_plans=3)`: a running router with those settings."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> Harness:
            router = await stack.enter_async_context(open_router(RouterConfig(seed=1, **settings)))
            harness = Harness(router, await stack.enter_async_context(open_channels()))
            stack.callback(lambda: [call.cancel() for call in harness.calls])
            return harness

        yield make


@pytest.fixture
async def mesh(start: Callable[..., Awaitable[Harness]]) -> Harness:
    """A router with default settings."""
    return await start()
