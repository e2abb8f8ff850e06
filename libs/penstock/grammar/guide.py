"""A request's way through its grammar: which tokens it has taken, how it may end, what it may take next."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as shallow
from dataclasses import dataclass, replace

import numpy as np

from penstock.grammar.matcher import GrammarLeft, Matcher
from penstock.grammar.tokenizer import GrammarTokenizer, MaskWords

MOST_FORCED = 32
"""Forced tokens that are told of at a time."""


@dataclass(frozen=True, slots=True)
class Endings:
    """How a text ends. When its grammar is complete, nothing but an end token is legal."""

    ends: frozenset[int]
    """End and stop tokens: none is taken without ending the text. Empty: one that llguidance takes for an end."""
    early: bool = True
    """The model's end tokens are legal wherever the grammar is satisfied, not only where it is complete."""
    least: int = 0
    """Tokens of output before which no end is legal, unless nothing else is."""


class Guide:
    """Follows one request's output. One thread at a time."""

    def __init__(self, tokenizer: GrammarTokenizer, start: Matcher, endings: Endings, begin: int) -> None:
        """`start` is the beginning of a text, which is copied; the output begins behind `begin` tokens of prompt."""
        self.tokenizer = tokenizer
        self._start = start
        if not endings.ends:
            endings = replace(endings, ends=frozenset(tokenizer.core.eos_tokens))
        self._endings = endings
        self._begin = begin
        self._until = begin
        self._over = False
        exact = tokenizer.trusted and endings == Endings(tokenizer.eos)
        self._settled = None if exact else (tokenizer.bits(endings.ends), tokenizer.bits(tokenizer.eos))
        """Rows with the ends, and with the model's end tokens; None when a mask of llguidance needs no change."""
        self.matcher = start.copy()
        """The state behind the tokens taken so far."""
        self.leads = True
        """Whether `forced` is wanted: it has to be known before the next step is planned."""
        self.forced: tuple[int, ...] = ()
        """Tokens that follow those taken so far, most probably; never more than MOST_FORCED."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end the text."""
        return self._endings.ends

    def copy(self) -> Guide:
        """The same state; what happens to one doesn't change the other."""
        made = shallow(self)
        made.matcher = self.matcher.copy()
        return made

    def restart(self) -> None:
        """As before the first token of output."""
        self.matcher, self._until, self._over, self.forced = self._start.copy(), self._begin, False, ()

    @property
    def until(self) -> int:
        """Tokens of prompt and output that are taken, or not looked at."""
        return self._until

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes those of `tokens` (prompt and output, of which it may have taken the first before) that are new."""
        if len(tokens) < self._until:
            self.restart()
        if len(tokens) > self._until:
            self.take(tokens[self._until :])

    def take(self, tokens: Sequence[int]) -> None:
        """The output goes on with `tokens`. Raises GrammarLeft when it may not."""
        text = list(tokens)
        for place, token in enumerate(text):
            if token in self._endings.ends:
                self._over = True
                del text[place:]
                break
        self.matcher.accept(text)
        self._until += len(tokens)
        self.forced = self._legal(self.matcher.forced()) if self.leads and not self._over else ()

    def legal(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Leading ones of `drafts` that the output may go on with. Ends are left to the target, which finds them in the
        same step."""
        return () if self._over else self._legal(drafts)

    def _legal(self, drafts: Sequence[int]) -> tuple[int, ...]:
        ends = self._endings.ends
        count = next((place for place, token in enumerate(drafts) if token in ends), len(drafts))
        count = self.matcher.legal(drafts[: min(count, MOST_FORCED)])
        return tuple(drafts[:count])

    def finish(self, rows: MaskWords) -> None:
        """Settles the ends in `rows` [1 + drafts, words]: what the grammar allows behind the tokens taken so far, and
        behind each of the drafts. Raises GrammarLeft when nothing may follow the tokens taken so far."""
        if self._over:
            raise GrammarLeft("the text is at its end")
        if self._settled is not None:
            for place, row in enumerate(rows):
                self._settle(row, self._until - self._begin + place, *self._settled)
        if not rows[0].any():
            raise GrammarLeft("nothing may follow the text")
        if len(rows) > 1:
            # behind a draft that is illegal itself: the target won't take it, so what follows doesn't matter
            rows[~rows.any(axis=1)] = -1

    def _settle(self, row: MaskWords, generated: int, ends: MaskWords, eos: MaskWords) -> None:
        endings, marks = self._endings, self.tokenizer.marks
        satisfied = bool((row & marks).any())
        row &= ~marks & self.tokenizer.inside
        if satisfied and not row.any():
            row |= ends
        elif satisfied and endings.early:
            row |= eos
        if generated < endings.least:
            left = row & ~ends
            if left.any():
                np.copyto(row, left)
