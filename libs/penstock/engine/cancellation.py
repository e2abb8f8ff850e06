"""Telling one's own end from somebody else's."""

from __future__ import annotations

import asyncio


def cancelled() -> bool:
    """Whether this very task is being cancelled, rather than something it waited for (a call that was torn down)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
