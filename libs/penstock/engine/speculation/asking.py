"""Takes drafts from a drafter, as many as have lately been worth their cost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from penstock.engine.config import EngineConfig
from penstock.engine.hooks import DraftAsk, Drafter, DraftTerms
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.appetite import Appetite
from penstock.engine.stats import Counters


class Speculation:
    """Tells the engine's drafter, if it has one, how far the sequences are, and takes the drafts that are there.

    It waits for drafts where they are expected in time, and no longer than they are expected to take; the step then
    runs without them.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, drafter: Drafter | None, counters: Counters) -> None:
        self._most = config.draft_tokens
        self._timeout_s = config.draft_timeout_s
        self._vocab_size = vocab_size
        self._drafter = drafter if config.draft_tokens else None
        self._terms: dict[int, DraftTerms] = {}
        """By ticket, of the sequences that are told of."""
        self._guided: set[int] = set()
        """Tickets of the sequences that have a grammar."""
        self._free: dict[int, int] = {}
        """By ticket: how many of the drafts at hand the grammar forces."""
        self._counters = counters
        self._appetites: dict[int, Appetite] = {}

    @property
    def active(self) -> bool:
        """Whether there may be drafts: from a drafter, or because a grammar forces tokens."""
        return self._drafter is not None or (bool(self._guided) and self._most > 0)

    @property
    def waits(self) -> bool:
        """Whether `ask` may wait for a drafter."""
        return self._drafter is not None

    def begin(self, live: Live) -> Appetite:
        """The account of a new sequence; ends with `forget`. The drafter can get ready."""
        self._appetites[live.ticket] = appetite = Appetite()
        if live.guide is not None:
            self._guided.add(live.ticket)
        if self._drafter is not None and live.request.sampling.max_tokens - live.generated > 1:
            request = live.request
            terms = DraftTerms(request.sampling, len(request.prompt), live.stops, request.owner)
            self._terms[live.ticket] = terms
            self._drafter.tell([DraftAsk(live.id, live.tokens, 0, terms)])
        return appetite

    async def ask(self, decoding: Sequence[Live]) -> dict[int, tuple[int, ...]]:
        """Proposed tokens by ticket, for sequences whose next step is a decode step. Where a grammar forces tokens,
        these are proposed, and what the drafter adds to them; what a grammar forbids is not."""
        drafts = await self._ask(decoding)
        if not self._guided or not self._most:
            return drafts
        self._free.clear()
        for live in decoding:
            if live.guide is None:
                continue
            forced = _forced(live)
            legal = live.guide.legal(drafts.get(live.ticket, ()))
            chosen = legal if legal[: len(forced)] == forced else forced
            if chosen:
                drafts[live.ticket] = chosen
                self._free[live.ticket] = len(forced)
            else:
                drafts.pop(live.ticket, None)
        return drafts

    async def _ask(self, decoding: Sequence[Live]) -> dict[int, tuple[int, ...]]:
        """The drafter's proposals."""
        if self._drafter is None:
            return {}
        told = [live for live in decoding if live.ticket in self._terms]
        if not told:
            return {}
        wanted = {live.ticket: self._wanted(live) for live in told}
        self._drafter.tell([self._ask_of(live, wanted[live.ticket]) for live in told])
        asked = [live for live in told if wanted[live.ticket]]
        await self._wait(asked, wanted)
        drafts = {live.ticket: self._usable(live, wanted[live.ticket]) for live in asked}
        return {ticket: tokens for ticket, tokens in drafts.items() if tokens}

    async def _wait(self, asked: Sequence[Live], wanted: Mapping[int, int]) -> None:
        """Returns when there are as many drafts as are wanted, or expected in time, or when it is too late."""
        assert self._drafter is not None
        try:
            async with asyncio.timeout(None) as limit:
                begun = asyncio.get_running_loop().time()
                while True:
                    waits = [self._drafter.expected(live.id, wanted[live.ticket]) for live in asked]
                    wait = max((wait for wait in waits if wait <= self._timeout_s), default=0.0)
                    if wait <= 0:
                        return
                    if limit.when() is None:
                        limit.reschedule(begun + wait)
                    await self._drafter.arrived()
        except TimeoutError:
            self._counters.draft_failures += 1

    def learn(self, live: Live, drafted: int, accepted: int) -> None:
        """A step verified `drafted` drafts of the sequence and accepted the first `accepted` of them."""
        free = min(self._free.get(live.ticket, 0), drafted)
        self._appetites[live.ticket].learn(drafted, accepted, free)
        self._counters.drafted += drafted
        self._counters.accepted += accepted

    def forget(self, live: Live) -> None:
        """Forgets a sequence that has ended, here and in the drafter."""
        self._appetites.pop(live.ticket, None)
        self._guided.discard(live.ticket)
        if self._terms.pop(live.ticket, None) is not None and self._drafter is not None:
            self._drafter.forget(live.id)

    def _wanted(self, live: Live) -> int:
        """How many drafts the next step is to verify, forced ones included."""
        free = len(_forced(live))
        room = live.request.sampling.max_tokens - live.generated - 1 - free
        wanted = self._appetites[live.ticket].wanted(min(self._most, room))
        return wanted + free if wanted > 0 else 0

    def _ask_of(self, live: Live, wanted: int) -> DraftAsk:
        """Asks for what this step verifies, and for what the next one does if it is all right."""
        room = live.request.sampling.max_tokens - live.generated - 1
        return DraftAsk(live.id, live.tokens, min(2 * wanted + 1, room) if wanted else 0, self._terms[live.ticket])

    def _usable(self, live: Live, wanted: int) -> tuple[int, ...]:
        """The drafts at hand up to the first entry that is not a token."""
        assert self._drafter is not None
        usable: list[int] = []
        for token in self._drafter.ahead(live.id, live.length)[:wanted]:
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                break
            usable.append(token)
        return tuple(usable)


def _forced(live: Live) -> tuple[int, ...]:
    """What the sequence's grammar forces next, as far as it may be drafted."""
    if live.guide is None:
        return ()
    return live.guide.forced[: max(0, live.request.sampling.max_tokens - live.generated - 1)]
