"""Prompts of random token ids, and requests that are sent together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from penstock.load.wording import FIRST_ID

Result = TypeVar("Result")


class PromptSource:
    """Random prompts of a vocabulary: the same for the same seed, and as good as never with a common beginning."""

    def __init__(self, vocab: int, seed: str) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab
        self.name = seed.replace("/", "-").replace(" ", "-")
        """For the names of sessions."""

    def tokens(self, count: int) -> list[int]:
        """The next ones."""
        return [self._random.randrange(FIRST_ID, self._vocab) for _ in range(count)]


async def everything(jobs: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order. The first error ends the other jobs."""
    async with first_error(), asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(job) for job in jobs]
    return [task.result() for task in started]


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Raises an error of a group, and of groups in it, in the group's place."""
    try:
        yield
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None
