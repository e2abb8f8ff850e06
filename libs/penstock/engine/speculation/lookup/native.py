"""Corpora in C++, which find and append in a time that does not depend on how long the texts are."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from ctypes import CDLL, c_int32

from penstock.engine.kernels.cpu.build import NotBuilt, library
from penstock.engine.speculation.lookup.chances import MOST, ONE, table
from penstock.engine.speculation.lookup.corpus import Corpora, Guess
from penstock.engine.speculation.lookup.plain import PlainCorpora


class NativeCorpus:
    """Owns a corpus of the library. To append releases the GIL."""

    def __init__(self, library: CDLL, limit: int) -> None:
        self.handle: int = library.penstock_corpus_open(limit)
        self._append = library.penstock_corpus_append
        weakref.finalize(self, library.penstock_corpus_close, self.handle).atexit = False

    def append(self, tokens: array[int]) -> None:
        """See `Corpus`."""
        address, count = tokens.buffer_info()
        self._append(self.handle, address, count)


class NativeCorpora:
    """See `Corpora`. One thread at a time may ask for guesses."""

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._guess = library.penstock_guess
        self._chances = table()
        self._table, _ = self._chances.buffer_info()
        self._tokens, self._found = (c_int32 * MOST)(), (c_int32 * MOST)()

    def new(self, limit: int) -> NativeCorpus:
        """See `Corpora`."""
        return NativeCorpus(self._library, limit)

    def guess(
        self,
        own: NativeCorpus,
        others: tuple[NativeCorpus | None, NativeCorpus | None],
        after: Sequence[int],
        most: int,
    ) -> Guess:
        """See `Corpora`."""
        second, third = (each and each.handle for each in others)
        behind = array("i", after)
        address, count = behind.buffer_info()
        found = self._guess(own.handle, second, third, address, count, self._table, most, self._tokens, self._found)
        return Guess(tuple(self._tokens[:found]), tuple([chance / ONE for chance in self._found[:found]]))


def corpora() -> Corpora:
    """In C++ where there is a compiler, else in numpy. May compile for a minute."""
    try:
        return NativeCorpora(library())
    except NotBuilt:
        return PlainCorpora()
