"""What clients do to a server: agents' sessions, a fan-out, plain requests, long prompts beside streams.

Every load is a function of the same arguments: how to ask, and a source of prompts. It returns its answers under
names, so that figures may speak of some of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.bench.e2e.answers import TimedAnswer
from penstock.bench.e2e.client import Begun


class Asking(Protocol):
    """Sends one request; see `TimedClient.ask`."""

    def __call__(
        self, prompt: Sequence[int], tokens: int, session: str, begun: Begun = ...
    ) -> Coroutine[Any, Any, TimedAnswer]: ...


Result = TypeVar("Result")
TimedAnswers = Mapping[str, Sequence[TimedAnswer]]
"""By what they were part of."""
_FIRST = 300
"""No prompt has tokens below: bytes and special ones are among them."""


class PromptSource:
    """Random prompts of a vocabulary: the same for the same seed, and as good as never with a common beginning."""

    def __init__(self, vocab: int, seed: str) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab
        self.name = seed.replace("/", "-").replace(" ", "-")
        """For the names of sessions."""

    def tokens(self, count: int) -> list[int]:
        """The next ones."""
        return [self._random.randrange(_FIRST, self._vocab) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """Sessions that begin together with the same system prompt, and send everything again in every turn."""

    sessions: int
    turns: int = 6
    system: int = 1200
    """Tokens that all sessions begin with."""
    new: int = 150
    """Further tokens that each turn brings."""
    output: int = 64
    """Tokens generated in each turn."""

    async def run(self, ask: Asking, source: PromptSource) -> TimedAnswers:
        """`turn1` to `turnN`."""
        system = source.tokens(self.system)
        turns: dict[str, list[TimedAnswer]] = {f"turn{number + 1}": [] for number in range(self.turns)}
        news = [[source.tokens(self.new) for _ in turns] for _ in range(self.sessions)]

        async def session(number: int) -> None:
            prompt = list(system)
            for turn, new in zip(turns.values(), news[number], strict=True):
                prompt += new
                answer = await ask(prompt, self.output, f"{source.name}-{number}")
                turn.append(answer)
                prompt += answer.ids

        await everything(session(number) for number in range(self.sessions))
        return turns


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutLoad:
    """An agent that has done one turn starts children at once, each with its whole context and a task of its own."""

    children: int
    system: int = 1200
    new: int = 150
    output: int = 64

    async def run(self, ask: Asking, source: PromptSource) -> TimedAnswers:
        """`parent` and `children`."""
        prompt = source.tokens(self.system + self.new)
        tasks = [source.tokens(self.new) for _ in range(self.children)]
        parent = await ask(prompt, self.output, source.name)
        prompt += parent.ids
        children = await everything(
            ask(prompt + task, self.output, f"{source.name}-{number}") for number, task in enumerate(tasks)
        )
        return {"parent": [parent], "children": children}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLoad:
    """Requests that have nothing in common, all at once."""

    streams: int
    prompt: int = 512
    output: int = 128

    async def run(self, ask: Asking, source: PromptSource) -> TimedAnswers:
        """`plain`."""
        prompts = [source.tokens(self.prompt) for _ in range(self.streams)]
        asked = (ask(prompt, self.output, f"{source.name}-{number}") for number, prompt in enumerate(prompts))
        return {"plain": await everything(asked)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoad:
    """Streams run; when all have begun, long prompts come, one after the other, until the streams end."""

    streams: int
    prompt: int = 128
    output: int = 256
    long: int = 2048
    long_output: int = 8

    async def run(self, ask: Asking, source: PromptSource) -> TimedAnswers:
        """`streams` and `long`."""
        prompts = [source.tokens(self.prompt) for _ in range(self.streams)]
        waited, all_begun = set(range(self.streams)), asyncio.Event()

        def begun(number: int) -> None:
            waited.discard(number)
            if not waited:
                all_begun.set()

        async def stream(number: int) -> TimedAnswer:
            return await ask(prompts[number], self.output, f"{source.name}-{number}", lambda: begun(number))

        long: list[TimedAnswer] = []

        async def prompts_beside(streams: asyncio.Future[list[TimedAnswer]]) -> None:
            await all_begun.wait()
            while not streams.done():
                prompt = source.tokens(self.long)
                long.append(await ask(prompt, self.long_output, f"{source.name}-long-{len(long)}"))

        async with _first_error(), asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(everything(stream(number) for number in range(self.streams)))
            tasks.create_task(prompts_beside(streams))
        return {"streams": streams.result(), "long": long}


async def everything(jobs: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order. The first error ends the other jobs."""
    async with _first_error(), asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(job) for job in jobs]
    return [task.result() for task in started]


@asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """Raises an error of a group in the group's place."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
