"""What a soak counts of its answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.bench.soak.asking import SoakOutcome
from penstock.bench.soak.heard import SoakAnswer, wrong_beginning, wrong_tokens

_MOST = 40


@dataclass(slots=True)
class SoakTally:
    """Takes each outcome once."""

    right: Mapping[str, SoakAnswer]
    """Right answers, by the names of what is asked."""
    done: int = 0
    left: int = 0
    """Of those done, requests whose clients left."""
    lost: int = 0
    wrong: int = 0
    """Tokens."""
    tokens: int = 0
    """That clients got."""
    again: int = 0
    """How often clients asked again."""
    resumed: int = 0
    """How often with a part of the answer, after which a gateway went on."""
    errors: int = 0
    """That gateways told which were there; clients asked again."""
    pause_s: float = 0.0
    """The longest between two tokens of a stream."""
    first_s: float = 0.0
    """The longest until the first token."""
    problems: list[str] = field(default_factory=list)
    """The first of them, for people."""
    told: list[str] = field(default_factory=list)
    """The first errors that gateways told."""

    def take(self, outcome: SoakOutcome) -> None:
        """One request has ended."""
        wish, heard = outcome.wish, outcome.heard
        self.done += 1
        self.left += outcome.left
        self.tokens += heard.tokens
        self.again += outcome.again
        self.resumed += outcome.resumed
        self.errors += len(outcome.errors)
        self._note(self.told, *(f"{wish.name}, {wish.ask.name}: {error}" for error in outcome.errors))
        if outcome.lost:
            self.lost += 1
            self._note(self.problems, f"{wish.name}, {wish.ask.name}: lost: {outcome.lost}")
            return
        right = self.right[wish.ask.name]
        if wrong := wrong_beginning(heard, right) if outcome.left else wrong_tokens(heard, right):
            self.wrong += wrong
            told = f"{wrong} tokens are wrong, asked again {outcome.again} times: {heard.choices} for {right.choices}"
            self._note(self.problems, f"{wish.name}, {wish.ask.name}: {told}"[:4000])
        if wish.streams and heard.times:
            self.pause_s = max(self.pause_s, heard.pause_s())
            self.first_s = max(self.first_s, heard.times[0] - outcome.asked_at)

    def take_line(self, id: str, name: str, heard: SoakAnswer | None) -> None:
        """One line of a batch has ended; without an answer it is lost."""
        self.done += 1
        if heard is None:
            self.lost += 1
            self._note(self.problems, f"{id} of the batch, {name}: lost")
            return
        self.tokens += heard.tokens
        if wrong := wrong_tokens(heard, self.right[name]):
            self.wrong += wrong
            self._note(self.problems, f"{id} of the batch, {name}: {wrong} tokens are wrong: {heard.choices}"[:4000])

    def _note(self, lines: list[str], *more: str) -> None:
        lines += more[: _MOST - len(lines)]


def slower(first: Sequence[SoakOutcome], last: Sequence[SoakOutcome]) -> tuple[float, float]:
    """How many times as long the last answers took as the first ones to the same requests: the median of the requests'
    own ratios, and that of the 95th percentiles. Only whole answers count."""
    took = [{one.wish.name.partition(" ")[2]: one.took_s for one in many if not one.left} for many in (first, last)]
    ratios = [took[1][name] / took[0][name] for name in took[0].keys() & took[1].keys()]
    tails = [statistics.quantiles(times.values(), n=20)[-1] for times in took]
    return statistics.median(ratios), tails[1] / tails[0]
