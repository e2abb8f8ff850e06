"""A worker's place among those that share its cores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from penstock.engine.config import EngineSettings
from penstock.runtime.turns.baton import Baton, own_claim, shared_directory
from penstock.runtime.turns.table import TableStuck

_LOG = structlog.get_logger("penstock.worker")


@asynccontextmanager
async def shared_cores(config: EngineSettings) -> AsyncIterator[Baton | None]:
    """The baton for the cores of this process, which stays on them from now on; None where there is to be none, or
    where the workers of this host have no memory in common."""
    if config.baton == "none" or config.device != "cpu":
        yield None
        return
    directory = shared_directory() if config.baton == "auto" else Path(config.baton)
    try:
        baton = await asyncio.to_thread(Baton, directory, own_claim(config.threads * config.tp * config.pp))
    except (OSError, TableStuck) as error:
        _LOG.warning("no turns on shared cores", reason=str(error))
        yield None
        return
    try:
        yield baton
    finally:
        await asyncio.to_thread(baton.close)
