"""Whether a second branch in a verify pass would pay: recorded sessions as in `replay`, with trees of two chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.bench.harness import Figure, figure
from penstock.bench.speculation.replay import RecordedTurn, recorded_turns, trace_name
from penstock.engine.speculation.guess import NOTHING, Guess, right
from penstock.engine.speculation.lookup.chances import LONGEST, MOST
from penstock.engine.speculation.lookup.lookup import Lookup, LookupLimits
from penstock.engine.speculation.lookup.plain import PlainCorpora, PlainCorpus

_TURNS = 60
_DRAFTS, _SECOND = 16, 4
"""Most tokens of a guess, and of its second branch where both have as many as the guess alone."""


class TwoGuesses(PlainCorpora):
    """Remembers, beside the best guess, the best of those that begin with another token."""

    second: Guess = NOTHING

    def guess(
        self, own: PlainCorpus, others: tuple[PlainCorpus | None, PlainCorpus | None], after: Sequence[int], most: int
    ) -> Guess:
        best = super().guess(own, others, after, most)
        self.second = NOTHING
        if best.tokens:
            context = [*own.last(LONGEST - len(after)), *after]
            found = self._others(best.tokens[0], [corpus for corpus in (own, *others) if corpus], context, most)
            self.second = max(found, key=lambda guess: guess.hope, default=NOTHING)
        return best

    def _others(self, first: int, corpora: Sequence[PlainCorpus], context: Sequence[int], most: int) -> Iterator[Guess]:
        """A guess of each source and length of match, from the places where another token than `first` follows. Their
        chances are as if nothing else had followed: that is more than they are worth."""
        for corpus in corpora:
            for order, places in corpus.places(context):
                runs = [corpus.run(place, min(most, MOST)) for place in places.tolist()]
                yield self._follow(order, [run for run in runs if run and run[0] != first], most)[0]


def tree_figures(paths: Sequence[Path], quick: bool) -> list[Figure]:
    """Tokens of a verify step with one branch and with two, of the first turns of each trace. Raises ConfigError."""
    found: list[Figure] = []
    for path in paths:
        turns = recorded_turns(path)[: 10 if quick else _TURNS]
        for words, first, second in (
            ("one", _DRAFTS, 0),
            ("same_rows", _DRAFTS - _SECOND, _SECOND),
            ("more_rows", _DRAFTS, _DRAFTS),
        ):
            tokens = tokens_per_step(turns, first, second)
            found.append(figure(f"trees_{words}_{trace_name(path)}", [tokens], "tokens", f"{first} and {second}"))
    return found


def tokens_per_step(turns: Sequence[RecordedTurn], first: int, second: int) -> float:
    """Of a verify step with so many tokens of the best guess, and so many of another branch."""
    corpora = TwoGuesses()
    lookup = Lookup(LookupLimits(), corpora)
    steps = tokens = 0
    for turn in turns:
        lookup.begin(0, turn.prompt, len(turn.prompt), b"all", turn.session)
        at, output = 0, turn.output
        while at < len(output):
            guess = lookup.propose(0, min(_DRAFTS, len(output) - at - 1)).tokens[:first]
            came = output[at:-1]
            kept = max(right(guess, came), right(corpora.second.tokens[:second], came)) + 1
            lookup.extend(0, output[at : at + kept])
            at, steps = at + kept, steps + 1
        lookup.end(0)
        tokens += len(output)
    return tokens / max(1, steps)
