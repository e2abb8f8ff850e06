"""Drafters in the engine's own process; a mesh has a draft service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from penstock.engine.hooks import DraftAsk
from penstock.engine.speculation.drafting import Proposer
from penstock.grammar.compiled import Grammars
from penstock.grammar.guide import Endings, Guide


class InlineDrafter:
    """Drafter over a proposer that is quick enough to be called on the event loop."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    async def propose(self, asks: Sequence[DraftAsk]) -> Mapping[str, Sequence[int]]:
        """The proposer's guesses for each ask."""
        return _by_id(asks, self._proposer.propose(asks))

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._proposer.forget(id)


class ThreadDrafter:
    """A drafter over a proposer that works in a thread. It drafts nothing while an abandoned call still runs."""

    def __init__(self, proposer: Proposer, thread: ThreadPoolExecutor, grammars: Grammars | None = None) -> None:
        self._proposer = proposer
        self._thread = thread
        self._grammars = grammars
        self._guides: dict[str, Guide] = {}
        self._call: asyncio.Future[list[list[int]]] | None = None

    async def propose(self, asks: Sequence[DraftAsk]) -> Mapping[str, Sequence[int]]:
        """The proposer's guesses for each ask."""
        if self._call is not None and not self._call.done():
            return {}
        loop = asyncio.get_running_loop()
        asks = [ask if ask.grammar is None else replace(ask, guide=await self._guide(ask)) for ask in asks]
        self._call = loop.run_in_executor(self._thread, self._proposer.propose, asks)
        return _by_id(asks, await asyncio.shield(self._call))

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._guides.pop(id, None)
        self._thread.submit(self._proposer.forget, id)

    async def _guide(self, ask: DraftAsk) -> Guide | None:
        if self._grammars is None or ask.grammar is None:
            return None
        if ask.id not in self._guides:
            endings = Endings(ask.grammar.ends)
            self._guides[ask.id] = await self._grammars.guide(ask.grammar.text, endings, ask.grammar.prompt)
        return self._guides[ask.id]


@contextmanager
def thread_drafter(proposer: Proposer, grammars: Grammars | None = None) -> Iterator[ThreadDrafter]:
    """A ThreadDrafter with a thread of its own; leaving waits for the call in progress. With `grammars` it follows
    those of the asks."""
    with ThreadPoolExecutor(1, "draft") as thread:
        yield ThreadDrafter(proposer, thread, grammars)


def _by_id(asks: Sequence[DraftAsk], answers: list[list[int]]) -> dict[str, Sequence[int]]:
    return {ask.id: answer for ask, answer in zip(asks, answers, strict=True) if answer}
