"""The lookup's part in drafting: guesses for each sequence for which looking is worth its time."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from penstock.engine.config import EngineSettings
from penstock.engine.scheduling.live import Live
from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.engine.speculation.lookup.lookup import Lookup, LookupLimits
from penstock.engine.speculation.lookup.native import corpora
from penstock.engine.speculation.trust import Trust
from penstock.runtime.threads import started_threads

_SELDOM = 8
"""Steps between two looks where these cost more than they have brought lately."""
_FADING = 0.8


@dataclass(slots=True)
class Looked:
    """What is known of one sequence."""

    trust: Trust = field(default_factory=Trust)
    told: int = 0
    """Tokens that the lookup has."""
    brought: float = 1.0
    """Tokens that a look has been hoped to bring lately: none where nothing was worth verifying."""
    fresh: bool = False
    """It was looked for the step that is being planned."""
    begin: int = 0
    """Where the last guess begins."""
    guess: Guess = NOTHING
    """For the last step, with the lookup's own chances."""

    @property
    def believed(self) -> Guess:
        """The guess with the chances that are believed."""
        return self.trust.corrected(self.guess)


class Looking:
    """Asks an engine's lookup."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._trust = Trust()
        """Over all sequences."""
        self._brought = 1.0
        """What a look was hoped to bring lately, of the sequence that was looked for last."""
        self._look_s = 0.0
        """Seconds of a look, on average."""
        self._steps = 0

    @property
    def defects(self) -> int:
        """Texts that could not be taken in."""
        return self._lookup.defects

    def begin(self) -> Looked:
        """Of a new sequence."""
        return Looked(self._trust.begun(), brought=self._brought)

    def step(self) -> None:
        """A step is being planned."""
        self._steps += 1

    def look_back(self, live: Live, looked: Looked) -> None:
        """Learns from what came of the last guess, verified or not."""
        guess, looked.guess = looked.guess, NOTHING
        if not guess.tokens:
            return
        came = live.tokens[looked.begin : looked.begin + len(guess.tokens)]
        for trust in (looked.trust, self._trust):
            trust.learn(guess, came)

    def settle(self, looked: Looked, verified: bool) -> None:
        """The step is planned, and verifies drafts of the sequence or none; whoever's they are, its own were worth as
        much as is hoped of them."""
        if looked.fresh:
            hope = looked.believed.hope if verified else 0.0
            self._brought = looked.brought = _FADING * looked.brought + (1 - _FADING) * hope
            looked.fresh = False

    def due(self, looked: Looked, token_s: float) -> bool:
        """Whether to look in this step, where a token is worth `token_s` seconds. Sequences for which a look is not
        worth it are looked for in the same steps: those between cost next to nothing."""
        return looked.brought * token_s >= self._look_s or not self._steps % _SELDOM

    def look(self, live: Live, looked: Looked, after: tuple[int, ...], most: int) -> None:
        """A guess of up to `most` tokens behind the text and the tokens `after`, which come next for sure."""
        began = time.perf_counter()
        self._tell(live, looked)
        looked.begin = live.length + len(after)
        looked.guess = self._lookup.propose(live.ticket, most, after)
        looked.fresh = True
        self._look_s += 0.02 * (time.perf_counter() - began - self._look_s)

    def forget(self, live: Live, looked: Looked) -> None:
        """The sequence has ended; others may find its text, also if it was never looked for itself."""
        self._tell(live, looked)
        self._lookup.end(live.ticket)

    def _tell(self, live: Live, looked: Looked) -> None:
        key, request = live.ticket, live.request
        if not looked.told:
            self._lookup.begin(key, live.tokens, len(request.prompt), request.owner, request.session)
        elif live.length > looked.told:
            self._lookup.extend(key, live.tokens[looked.told :])
        looked.told = live.length


async def open_lookup(config: EngineSettings, stack: ExitStack) -> Lookup | None:
    """As the settings say; `stack` ends its thread."""
    if not config.lookup_tokens or not config.draft_tokens:
        return None
    forms = await asyncio.to_thread(corpora)
    thread = stack.enter_context(started_threads(1, "lookup"))
    return Lookup(LookupLimits(tokens=config.lookup_tokens), forms, thread)
