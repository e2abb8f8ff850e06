"""Texts that are remembered, and how a prompt is taken in that they have the beginning of already."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import xxhash

from penstock.engine.speculation.lookup.chances import BREAK, LONGEST
from penstock.engine.speculation.lookup.corpus import Corpora

_BLOCK = 64
_FEW = 256
_log = logging.getLogger(__name__)


class Chained:
    """A text's blocks of 64 tokens, as digests that cover all before them too."""

    def __init__(self) -> None:
        self._digest = 0
        self._rest = array("i")

    def add(self, tokens: array[int]) -> list[int]:
        """The text goes on: the digests of the blocks that are full now."""
        self._rest += tokens
        full = len(self._rest) // _BLOCK * _BLOCK
        data, digests = memoryview(self._rest), []
        for at in range(0, full, _BLOCK):
            self._digest = xxhash.xxh3_64_intdigest(data[at : at + _BLOCK], self._digest)
            digests.append(self._digest)
        data.release()
        self._rest = self._rest[full:]
        return digests


class Body:
    """A corpus that jobs append to, in their order. While one of them has still to be done it can't be read."""

    def __init__(self, corpora: Corpora, limit: int, executor: Executor | None) -> None:
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
            self._last = self._executor.submit(_watched, job)

    def append(self, text: array[int]) -> None:
        """In a job: appends a text."""
        self._corpus.append(array("i", [BREAK]))
        self._corpus.append(text)
        self._end += 1 + len(text)

    def take_in(self, prompt: array[int], chained: Chained) -> None:
        """In a job: appends what was not taken in before with all that stands in front of it. `chained` is new."""
        digests = chained.add(prompt)
        known = len(digests)
        while known and not self._has(digests[known - 1]):
            known -= 1
        start, place = max(0, known * _BLOCK - LONGEST), self._end + 1
        if known * _BLOCK < len(prompt):
            self.append(prompt[start:])
        self._note(digests[known:], place + known * _BLOCK - start, _BLOCK)

    def take_on(self, answer: array[int], output: int, chained: Chained) -> None:
        """In a job: appends an answer, whose last tokens are the output behind the text of `chained`."""
        place = self._end
        self.append(answer)
        self._note(chained.add(answer[len(answer) - output :]), place, 0)

    def _has(self, digest: int) -> bool:
        return digest in self._places and self._places[digest] >= self._end - self._limit

    def _note(self, digests: Sequence[int], place: int, apart: int) -> None:
        self._places.update((digest, place + apart * number) for number, digest in enumerate(digests))
        if len(self._places) > 2 * self._limit // _BLOCK + _FEW:
            self._places = {digest: place for digest, place in self._places.items() if self._has(digest)}


def _watched(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        _log.exception("a text could not be taken in; guesses are made without it")
