"""Opens the state that a router shares, as its settings say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.router.config import RouterConfig
from penstock.router.shared.commons import Commons
from penstock.router.shared.in_redis import RedisState, RedisTerms
from penstock.runtime.metrics import RouterMetrics
from penstock.runtime.redis_client import open_redis
from penstock.runtime.tasks import beside

_START_S = 1.0
"""Most that a router waits, before it serves, for what was known before it."""


@asynccontextmanager
async def shared(
    config: RouterConfig, commons: Commons, owner: str, *, metrics: RouterMetrics, clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Shares `commons` under the name `owner` for the length of the block. Raises ConfigError."""
    if config.state == "memory":
        yield
        return
    terms = RedisTerms(
        owner=owner, lease_s=config.state_lease_s, record_s=config.session_ttl_s, most_records=config.max_sessions
    )
    async with open_redis("state", config.state) as client:
        state = RedisState(client, commons, terms, metrics, clock)
        try:
            async with beside(state.keep, name="shared state", on_failure="restart", failed=metrics.task_failed):
                await state.first(_START_S)
                yield
        finally:
            await state.leave()
