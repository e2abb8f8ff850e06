"""Grammars that are compiled already, for one model: the last ones used, by the digest of their text."""

from __future__ import annotations

import _thread
import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from penstock.grammar.guide import Endings, Guide
from penstock.grammar.matcher import MOST_CHARACTERS, GrammarBroken, Matcher
from penstock.grammar.tokenizer import GrammarTokenizer

_AT_ONCE = 2
"""Threads that compile. One that a hostile grammar keeps for minutes leaves the other."""
_MOST_PENDING = 256


class GrammarsBusy(Exception):
    """Too many grammars are being compiled: retry later or elsewhere."""


class Grammars:
    """Compiles grammars in threads of their own, which nothing waits for at the end, and keeps the results. Belongs to
    one event loop."""

    def __init__(self, load: Callable[[], GrammarTokenizer], *, most: int = 256, longest_s: float = 10.0) -> None:
        """`load` is called once, in a thread, before the first grammar; `most` compiled grammars are kept; one that
        takes longer than `longest_s` is refused."""
        self._load = load
        self._most = most
        self._longest_s = longest_s
        self._tokenizer: GrammarTokenizer | None = None
        self._loading = Lock()
        self._known: OrderedDict[bytes, Matcher | str] = OrderedDict()
        """A string says what is wrong with the grammar."""
        self._pending: dict[bytes, asyncio.Future[Matcher | Exception]] = {}
        self._line: deque[tuple[bytes, str]] = deque()
        self._working = 0

    async def guide(self, text: str, endings: Endings, begin: int) -> Guide:
        """The way through the grammar `text`, for an output that begins behind `begin` tokens of prompt. Raises
        GrammarBroken, and GrammarsBusy."""
        if len(text) > MOST_CHARACTERS:
            raise GrammarBroken(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are possible")
        digest = _digest(text)
        found: Matcher | Exception | None = self._ready(digest)
        if found is None:
            try:
                async with asyncio.timeout(self._longest_s):
                    found = await asyncio.shield(self._begin(digest, text))
            except TimeoutError:
                raise GrammarBroken(f"it is not compiled after {self._longest_s:g} s") from None
        if isinstance(found, Matcher):
            return self._guide(found, endings, begin)
        raise found

    def guide_if_ready(self, text: str, endings: Endings, begin: int) -> Guide | None:
        """The same, if the grammar is compiled; otherwise this begins with it. None also when it is broken."""
        digest = _digest(text)
        found = self._ready(digest)
        if isinstance(found, Matcher):
            return self._guide(found, endings, begin)
        if found is None and len(text) <= MOST_CHARACTERS:
            with suppress(GrammarsBusy):
                self._begin(digest, text)
        return None

    def _guide(self, matcher: Matcher, endings: Endings, begin: int) -> Guide:
        assert self._tokenizer is not None, "no grammar is compiled without it"
        return Guide(self._tokenizer, matcher, endings, begin)

    def _ready(self, digest: bytes) -> Matcher | GrammarBroken | None:
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
        return GrammarBroken(known) if isinstance(known, str) else known

    def _begin(self, digest: bytes, text: str) -> asyncio.Future[Matcher | Exception]:
        """Puts a grammar in the line, if it isn't there."""
        pending = self._pending.get(digest)
        if pending is None:
            if len(self._pending) >= _MOST_PENDING:
                raise GrammarsBusy(f"{len(self._pending)} grammars are being compiled already")
            pending = self._pending[digest] = asyncio.get_running_loop().create_future()
            self._line.append((digest, text))
            self._go_on()
        return pending

    def _go_on(self) -> None:
        """Begins with what is next in the line, if a thread is free."""
        while self._line and self._working < _AT_ONCE:
            digest, text = self._line.popleft()
            self._working += 1
            loop = asyncio.get_running_loop()
            _thread.start_new_thread(self._work, (loop, digest, text))  # Thread.start waits until the thread runs

    def _work(self, loop: asyncio.AbstractEventLoop, digest: bytes, text: str) -> None:
        """In a thread."""
        result: Matcher | Exception
        try:
            with self._loading:
                if self._tokenizer is None:
                    self._tokenizer = self._load()
            result = Matcher.of(self._tokenizer, text)
        except Exception as error:
            result = error
        except BaseException as error:  # a panic of llguidance's is no Exception
            result = GrammarBroken(f"it can't be compiled: {error}")
        with suppress(RuntimeError):  # the loop may be closed, and then nobody waits any more
            loop.call_soon_threadsafe(self._done, digest, result)

    def _done(self, digest: bytes, result: Matcher | Exception) -> None:
        self._working -= 1
        if isinstance(result, Matcher | GrammarBroken):
            self._known[digest] = result if isinstance(result, Matcher) else str(result)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        self._pending.pop(digest).set_result(result)
        self._go_on()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
