"""Corpora in numpy, for machines without a compiler. Says what kernels/cpu/lookup.cpp does."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.engine.speculation.lookup.chances import BREAK, LEAST, LONGEST, MATCHED, MOST, ONE, ORDERS, PLACES, table

_FIRST_ROOM = 512
Places = NDArray[np.intp]


class PlainCorpus:
    """A corpus without an index: each search looks at all tokens, some hundred microseconds for 100,000."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = np.empty(_FIRST_ROOM, np.int32)
        self._end = 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The last ones, at most `limit`."""
        return self._room[max(0, self._end - self._limit) : self._end]

    def append(self, tokens: array[int]) -> None:
        """See `Corpus`."""
        if self._end + len(tokens) > len(self._room):
            kept = self.tokens
            room = np.empty(2 * (len(kept) + len(tokens)), np.int32)
            room[: len(kept)] = kept
            self._room, self._end = room, len(kept)
        self._room[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)

    def last(self, most: int) -> list[int]:
        """The last tokens, none before a break."""
        tail: list[int] = self.tokens[-most:].tolist() if most else []
        return tail[len(tail) - tail[::-1].index(BREAK) :] if BREAK in tail else tail

    def run(self, place: int, most: int) -> list[int]:
        """The tokens from a place on, at most `most`, to the end of the text."""
        run: list[int] = self.tokens[place : place + most].tolist()
        return run[: run.index(BREAK)] if BREAK in run else run

    def places(self, context: Sequence[int]) -> Iterator[tuple[int, Places]]:
        """For each order where the last tokens of `context` stand: the places behind them, the latest first."""
        tokens = self.tokens
        found = np.flatnonzero(tokens[:-1] == context[-1]) + 1
        found = found[tokens[found] != BREAK]
        for back in range(1, len(context) + 1):
            if back > 1:
                found = found[found >= back]
                found = found[tokens[found - back] == context[-back]]
            if back in ORDERS:
                yield back, found[: -PLACES - 1 : -1]


class PlainCorpora:
    """See `Corpora`."""

    def __init__(self) -> None:
        self._chances = np.array(table()).reshape(MATCHED + 1, PLACES + 1, PLACES + 1).tolist()

    def new(self, limit: int) -> PlainCorpus:
        """See `Corpora`."""
        return PlainCorpus(limit)

    def guess(
        self,
        own: PlainCorpus,
        others: tuple[PlainCorpus | None, PlainCorpus | None],
        after: Sequence[int],
        most: int,
    ) -> Guess:
        """See `Corpora`."""
        forced = list(after[-LONGEST:])
        context = [*own.last(LONGEST - len(forced)), *forced]
        best, worth = NOTHING, 0
        for corpus in (own, *others):
            if corpus is None or not context:
                continue
            for order, places in reversed([*corpus.places(context)]):
                runs = [corpus.run(place, min(most, MOST)) for place in places.tolist()]
                guess, here = self._follow(order, runs, most)
                if here > worth:
                    best, worth = guess, here
        return best

    def _follow(self, order: int, runs: list[list[int]], most: int) -> tuple[Guess, int]:
        """The most frequent beginning of the runs, and how many of its tokens are expected to be right."""
        path: list[int] = []
        chances: list[float] = []
        whole, worth = ONE, 0
        for depth in range(most):
            runs = [run for run in runs if len(run) > depth]
            if not runs:
                break
            followers = [run[depth] for run in runs]
            token = max(followers, key=followers.count)  # of several equal ones the latest
            chance = self._chances[min(order + depth, MATCHED)][len(runs)][followers.count(token)]
            whole = whole * chance >> 16
            if whole < LEAST:
                break
            worth += whole
            path.append(token)
            chances.append(chance / ONE)
            runs = [run for run in runs if run[depth] == token]
        return Guess(tuple(path), tuple(chances)), worth
