"""Texts that are remembered, and how a prompt is taken in that they have the beginning of already."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from itertools import count, repeat
from typing import Any

import numpy as np

from penstock.engine.speculation.lookup.chances import BREAK, LONGEST
from penstock.engine.speculation.lookup.corpus import Corpora

_BLOCK = 64
_BASE = 0x9E3779B97F4A7C15
_FEW = 256
_PIECE = 8192
_PAUSE_S = 50e-6
"""After a piece of a prompt the event loop gets the interpreter, which it would otherwise ask for in vain for 5 ms."""
_log = logging.getLogger(__name__)


class Chained:
    """A text's blocks of 64 tokens, as digests that cover all before them too: values of a polynomial modulo 2^64."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = np.zeros(1, np.uint64)

    def add(self, tokens: array[int]) -> list[int]:
        """The text goes on: the digests of the blocks that are full now."""
        powers = np.full(len(tokens) + 1, _BASE, np.uint64)
        powers[0] = pow(_BASE, self._count, 1 << 64)
        terms = (np.frombuffer(tokens, np.int32).astype(np.uint64) + 1) * np.multiply.accumulate(powers)[:-1]
        sums = np.cumsum(np.concatenate((self._sum, terms)))
        digests: list[int] = sums[_BLOCK - self._count % _BLOCK :: _BLOCK].tolist()
        self._count, self._sum = self._count + len(tokens), sums[-1:]
        return digests


class Body:
    """A corpus that jobs append to, in their order. While one of them has still to be done it can't be read."""

    def __init__(self, corpora: Corpora, limit: int, executor: Executor | None, failed: Callable[[], None]) -> None:
        """`failed` is called where a job ends with a defect, in the executor."""
        self._failed = failed
        self._corpus = corpora.new(limit)
        self._limit = limit
        self._executor = executor
        self._last: Future[None] | None = None
        self._end = 0
        self._places: dict[int, int] = {}
        """Of the blocks that were taken in, by their digests."""

    @property
    def held(self) -> int:
        """Tokens that are here."""
        return min(self._end, self._limit)

    @property
    def readable(self) -> Any:
        """The corpus; None while it is being appended to."""
        return self._corpus if self._last is None or self._last.done() else None

    def do(self, job: Callable[[], None]) -> None:
        """Has a job done that appends: in the executor, or at once where there is none."""
        if self._executor is None:
            job()
        else:
            self._last = self._executor.submit(self._watched, job)

    def append(self, text: array[int]) -> None:
        """In a job: appends a text."""
        self._corpus.append(array("i", [BREAK]))
        self._corpus.append(text)
        self._end += 1 + len(text)

    def take_in(self, tokens: Sequence[int], chained: Chained) -> None:
        """In a job: appends of a prompt what was not taken in before with all that stands in front of it. `chained` is
        new."""
        prompt, digests = array("i"), list[int]()
        for at in range(0, len(tokens), _PIECE):
            piece = array("i", tokens[at : at + _PIECE])
            prompt += piece
            digests += chained.add(piece)
            if self._executor is not None:
                time.sleep(_PAUSE_S)
        known = len(digests)
        while known and not self._has(digests[known - 1]):
            known -= 1
        start, place = max(0, known * _BLOCK - LONGEST), self._end + 1
        if known * _BLOCK < len(prompt):
            self.append(prompt[start:])
        self._note(digests[known:], count(place + known * _BLOCK - start, _BLOCK))

    def take_on(self, answer: array[int], output: int, chained: Chained) -> None:
        """In a job: appends an answer, whose last tokens are the output behind the text of `chained`."""
        place = self._end
        self.append(answer)
        self._note(chained.add(answer[len(answer) - output :]), repeat(place))

    def _has(self, digest: int) -> bool:
        return digest in self._places and self._places[digest] >= self._end - self._limit

    def _note(self, digests: Sequence[int], places: Iterable[int]) -> None:
        self._places.update(zip(digests, places, strict=False))
        if len(self._places) > 2 * self._limit // _BLOCK + _FEW:
            self._places = {digest: place for digest, place in self._places.items() if self._has(digest)}

    def _watched(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            self._failed()
            _log.exception("a text could not be taken in; guesses are made without it")
