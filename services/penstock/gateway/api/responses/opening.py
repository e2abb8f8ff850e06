"""Opens the store of responses that the settings name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.gateway.api.responses.in_redis import open_redis_responses
from penstock.gateway.api.responses.store import MemoryResponses, ResponseStore, StoreBounds
from penstock.gateway.config import GatewayConfig


@asynccontextmanager
async def open_responses(config: GatewayConfig) -> AsyncIterator[ResponseStore]:
    """The store for the length of the block. Raises ConfigError."""
    bounds = StoreBounds(
        tenant_count=config.max_tenant_responses,
        tenant_bytes=config.max_tenant_responses_bytes,
        count=config.max_responses,
        bytes=config.max_responses_bytes,
        ttl_s=config.responses_ttl_s,
    )
    if config.responses_store == "memory":
        yield MemoryResponses(bounds)
        return
    async with open_redis_responses(config.responses_store, bounds) as store:
        yield store
