"""Corpora in C++, which find and append in a time that does not depend on how long the texts are."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from ctypes import CDLL, PyDLL, addressof, c_double, c_int32

from penstock.engine.kernels.cpu.build import NotBuilt, library
from penstock.engine.kernels.cpu.layout import declare
from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.engine.speculation.lookup.chances import MOST, table
from penstock.engine.speculation.lookup.corpus import Corpora
from penstock.engine.speculation.lookup.plain import PlainCorpora

_NONE = array("i")
_SHORT = 256
"""So many tokens are appended without letting go of the GIL: to get it back may take longer."""


class NativeCorpus:
    """Owns a corpus of the library."""

    def __init__(self, quick: PyDLL, library: CDLL, limit: int) -> None:
        self.handle: int = quick.penstock_corpus_open(limit)
        self._append_short, self._append_long = quick.penstock_corpus_append, library.penstock_corpus_append
        weakref.finalize(self, quick.penstock_corpus_close, self.handle).atexit = False

    def append(self, tokens: array[int]) -> None:
        """See `Corpus`."""
        address, count = tokens.buffer_info()
        (self._append_short if count <= _SHORT else self._append_long)(self.handle, address, count)


class NativeCorpora:
    """See `Corpora`. One thread at a time may ask for guesses."""

    def __init__(self, library: CDLL) -> None:
        self._library, self._quick = library, PyDLL(library._name, handle=library._handle)
        declare(self._quick)
        self._guess = self._quick.penstock_guess
        self._table = table()
        self._tokens, self._chances = (c_int32 * MOST)(), (c_double * MOST)()
        self._places = self._table.buffer_info()[0], addressof(self._tokens), addressof(self._chances)

    def new(self, limit: int) -> NativeCorpus:
        """See `Corpora`."""
        return NativeCorpus(self._quick, self._library, limit)

    def guess(
        self,
        own: NativeCorpus,
        others: tuple[NativeCorpus | None, NativeCorpus | None],
        after: Sequence[int],
        most: int,
    ) -> Guess:
        """See `Corpora`."""
        second, third = others
        forced = array("i", after) if after else _NONE
        chances, tokens, found = self._places
        count = self._guess(
            own.handle,
            second and second.handle,
            third and third.handle,
            *forced.buffer_info(),
            chances,
            most,
            tokens,
            found,
        )
        return Guess(tuple(self._tokens[:count]), tuple(self._chances[:count])) if count else NOTHING


def corpora() -> Corpora:
    """In C++ where there is a compiler, else in numpy. May compile for a minute."""
    try:
        return NativeCorpora(library())
    except NotBuilt:
        return PlainCorpora()
