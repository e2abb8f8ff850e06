"""Asks a drafter for drafts, for as many as have lately been worth their cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.engine.config import EngineConfig
from penstock.engine.hooks import DraftAsk, Drafter, GrammarAsk
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.appetite import Appetite
from penstock.engine.stats import Counters
from penstock.runtime.tasks import being_cancelled

_LONGEST_PAUSE = 256
_RELIABLE = 64
"""A drafter that was late or failed is called reliable again after this many answers in a row."""
_log = logging.getLogger(__name__)


class Speculation:
    """Asks the engine's drafter, if it has one, for drafts.

    When a drafter is late, fails or gives an invalid answer, the step runs without drafts. Each further failure in a
    row doubles the number of steps for which it is not asked again.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, drafter: Drafter | None, counters: Counters) -> None:
        self._most = config.draft_tokens
        self._timeout_s = config.draft_timeout_s
        self._vocab_size = vocab_size
        self._drafter = drafter
        self._grammars: dict[int, GrammarAsk] = {}
        """By ticket, of the sequences that have one."""
        self._free: dict[int, int] = {}
        """By ticket: how many of the drafts at hand the grammar forces."""
        self._counters = counters
        self._appetites: dict[int, Appetite] = {}
        self._pause = 0
        self._misses = 0
        self._answers = 0
        """Answers in a row."""
        self._reliable = True
        self._failed = False

    @property
    def active(self) -> bool:
        """Whether there may be drafts: from a drafter, or because a grammar forces tokens."""
        return self._drafter is not None or (bool(self._grammars) and self._most > 0)

    @property
    def waits(self) -> bool:
        """Whether `ask` waits for a drafter."""
        return self._drafter is not None

    def begin(self, live: Live) -> Appetite:
        """The account of a new sequence; ends with `forget`."""
        self._appetites[live.ticket] = appetite = Appetite()
        if live.guide is not None:
            self._grammars[live.ticket] = GrammarAsk(
                live.request.sampling.grammar, len(live.request.prompt), live.stops
            )
        return appetite

    async def ask(self, decoding: Sequence[Live]) -> dict[int, tuple[int, ...]]:
        """Proposed tokens by ticket, for sequences whose next step is a decode step. Where a grammar forces tokens,
        these are proposed, and what the drafter adds to them; what a grammar forbids is not."""
        drafts = await self._ask(decoding)
        if not self._grammars or not self._most:
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
        if self._pause:
            self._pause -= 1
            return {}
        asks = {live.ticket: ask for live in decoding if (ask := self._ask_of(live)).k > 0}
        if not asks:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._drafter.propose(list(asks.values()))
            self._answered()
            return {ticket: self._usable(ask, found.get(ask.id, ())) for ticket, ask in asks.items()}
        except (Exception, asyncio.CancelledError) as error:
            if being_cancelled():
                raise
            self._missed(error)
            return {}

    def learn(self, live: Live, drafted: int, accepted: int) -> None:
        """A step verified `drafted` drafts of the sequence and accepted the first `accepted` of them."""
        free = min(self._free.get(live.ticket, 0), drafted)
        self._appetites[live.ticket].learn(drafted, accepted, free)
        self._counters.drafted += drafted
        self._counters.accepted += accepted

    def forget(self, live: Live) -> None:
        """Forgets a sequence that has ended, here and in the drafter."""
        self._appetites.pop(live.ticket, None)
        self._grammars.pop(live.ticket, None)
        if self._drafter is None:
            return
        try:
            self._drafter.forget(live.id)
        except Exception:
            _log.warning("the drafter could not forget %s", live.id, exc_info=True)

    def _ask_of(self, live: Live) -> DraftAsk:
        params, free = live.request.sampling, len(_forced(live))
        room = params.max_tokens - live.generated - 1
        wanted = self._appetites[live.ticket].wanted(min(self._most, room - free))
        return DraftAsk(
            id=live.id,
            tokens=live.tokens,
            k=wanted + free if wanted > 0 else 0,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            grammar=self._grammars.get(live.ticket),
        )

    def _usable(self, ask: DraftAsk, proposed: Sequence[int]) -> tuple[int, ...]:
        """The proposal up to the first entry that is not a token."""
        usable: list[int] = []
        for token in proposed[: ask.k]:
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                break
            usable.append(token)
        return tuple(usable)

    def _answered(self) -> None:
        self._misses = 0
        self._answers += 1
        if not self._reliable and self._answers >= _RELIABLE:
            self._reliable, self._failed = True, False
            _log.info("the drafter answers in time again")

    def _missed(self, error: BaseException) -> None:
        self._counters.draft_failures += 1
        self._misses += 1
        self._answers = 0
        self._pause = min(2**self._misses, _LONGEST_PAUSE)
        # Each is said once: a drafter on a busy host is late all the time, and nothing is wrong then.
        if isinstance(error, TimeoutError):
            if self._reliable:
                _log.info("the drafter is late, and is asked less often")
        elif not self._failed:
            self._failed = True
            _log.warning("the drafter failed, and is asked less often: %r", error)
        self._reliable = False


def _forced(live: Live) -> tuple[int, ...]:
    """What the sequence's grammar forces next, as far as it may be drafted."""
    if live.guide is None:
        return ()
    return live.guide.forced[: max(0, live.request.sampling.max_tokens - live.generated - 1)]
