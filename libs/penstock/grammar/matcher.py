"""The state of one text within its grammar.

Three habits of llguidance decide how it is used here. A matcher that was rolled back may lose legal tokens, so what is
only tried is tried on a copy, and no matcher is ever rolled back. An error is a state, not an exception, in which the
mask says that the text may end; so every call is followed by a look at that state. The end token is no part of the
text, and no matcher is given one.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits

from penstock.grammar.tokenizer import GrammarTokenizer

MOST_CHARACTERS = 1 << 20
"""Of a grammar's text."""
_MOST_TOLD = 300
"""Characters of an error that are passed on: the rest shows the parser's state."""


class GrammarBroken(ValueError):
    """The text is no grammar that can be followed."""


class GrammarLeft(Exception):
    """A text left its grammar, or its parser reached a limit: it can't go on."""


def limits() -> LLParserLimits:
    """What compiling a grammar, and each step within it, may cost. Where they are exceeded, errors tell nothing of the
    text."""
    return LLParserLimits(verbose_errors=False)


class Matcher:
    """What a text may go on with. One thread at a time."""

    __slots__ = ("_core",)

    def __init__(self, core: LLMatcher) -> None:
        self._core = core

    @classmethod
    def of(cls, tokenizer: GrammarTokenizer, text: str) -> Matcher:
        """The beginning of a text of the grammar `text`. Takes milliseconds, or very long for a hostile grammar; other
        threads run meanwhile. Raises GrammarBroken."""
        if len(text) > MOST_CHARACTERS:
            raise GrammarBroken(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are possible")
        core = LLMatcher(tokenizer.core, text, log_level=0, limits=limits())
        if core.is_error():
            raise GrammarBroken(_told(core))
        first = core.deep_copy()  # some limits are noticed only by the first mask
        mask = first.compute_bitmask()
        if first.is_error():
            raise GrammarBroken(_told(first))
        if not any(mask) or (first.is_stopped() and not first.is_accepting()):
            raise GrammarBroken("no text satisfies it")
        return cls(core)

    @property
    def core(self) -> LLMatcher:
        """llguidance's own, to compute masks with."""
        return self._core

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        accepting: bool = self._core.is_accepting()
        self._check()
        return accepting

    @property
    def complete(self) -> bool:
        """Whether the text has to end here."""
        stopped: bool = self._core.is_stopped()
        self._check()
        return stopped

    def copy(self) -> Matcher:
        """The same state; what happens to one doesn't change the other."""
        return Matcher(self._core.deep_copy())

    def accept(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`. Raises GrammarLeft when it may not."""
        if tokens and not self._core.consume_tokens(list(tokens)):
            raise GrammarLeft(_told(self._core))
        self._check()

    def legal(self, tokens: Sequence[int]) -> int:
        """How many leading ones of `tokens` the text may go on with."""
        if not tokens or self.complete:
            return 0
        count: int = self._core.validate_tokens(list(tokens))
        self._check()
        return count

    def forced(self) -> tuple[int, ...]:
        """Tokens that the text most probably goes on with, because it must go on with their letters."""
        if self.complete:
            return ()
        tokens = self._core.compute_ff_tokens()
        self._check()
        # they may hold a token that stands for more than its letters, which would be refused
        return tuple(tokens[: self.legal(tokens)]) if tokens else ()

    def _check(self) -> None:
        if self._core.is_error():
            raise GrammarLeft(_told(self._core))


def _told(core: LLMatcher) -> str:
    lines = core.get_error().strip().splitlines()
    return (lines[0] if lines else "the grammar can't be followed")[:_MOST_TOLD]
