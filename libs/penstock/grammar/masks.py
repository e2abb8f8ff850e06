"""The masks of a step: for every guided text, what may follow it and each of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from penstock.grammar.guide import Guide
from penstock.grammar.matcher import GrammarLeft
from penstock.grammar.tokenizer import MaskWords


@dataclass(frozen=True, slots=True)
class MaskAsk:
    """Asks for the masks behind `tokens` (prompt and output, of which the guide may have taken the first before) and
    behind each of the `drafts`."""

    guide: Guide
    tokens: Sequence[int]
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step."""

    rows: MaskWords
    """[rows, words]: for each text one row, and one for each of its drafts."""
    first: list[int]
    """Number of each text's first row."""
    failed: dict[int, GrammarLeft]
    """Texts, by their number, that can't go on. Their rows allow everything."""


class MaskMaker:
    """Computes masks, of many texts at a time in a few calls that let other threads run."""

    def __init__(self, threads: int) -> None:
        self._executor = LLExecutor(threads)

    def masks(self, asks: Sequence[MaskAsk]) -> StepMasks:
        """Takes the asks' new tokens, and answers the asks, at least one and all of one tokenizer."""
        first, count = [], 0
        for ask in asks:
            first.append(count)
            count += 1 + len(ask.drafts)
        made = StepMasks(np.zeros((count, asks[0].guide.tokenizer.words), dtype=np.int32), first, {})
        able: list[tuple[MaskAsk, int]] = []
        for number, ask in enumerate(asks):
            try:
                ask.guide.follow(ask.tokens)
                able.append((ask, first[number]))
            except GrammarLeft as error:
                made.failed[number] = error
        self._fill(able, made.rows)
        for number, (ask, at) in enumerate(zip(asks, first, strict=True)):
            rows = made.rows[at : at + 1 + len(ask.drafts)]
            if number not in made.failed:
                try:
                    ask.guide.finish(rows)
                except GrammarLeft as error:
                    made.failed[number] = error
            if number in made.failed:
                rows[:] = -1
        return made

    def _fill(self, asks: Sequence[tuple[MaskAsk, int]], rows: MaskWords) -> None:
        """What the grammars allow, for asks whose first row is known; nothing behind a draft that is not legal, or
        where a parser gives up."""
        plain = [(ask.guide.matcher.core, at) for ask, at in asks if not ask.drafts]
        drafted = [(ask.guide.matcher.core.deep_copy(), at, list(ask.drafts)) for ask, at in asks if ask.drafts]
        address, width, count = rows.ctypes.data, rows.strides[0], len(rows)
        if len(plain) == 1:
            [(core, at)] = plain
            core.unsafe_compute_mask_ptr(address + at * width, width)
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, width, count)
        for core, at in plain:
            if core.is_error():
                rows[at] = 0
        if drafted:  # this rolls the matchers back, which then are of no use any more
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, width, count)
        for (core, at, _), ask in zip(drafted, (ask for ask, _ in asks if ask.drafts), strict=True):
            if core.is_error():
                _one_by_one(ask.guide.matcher.core.deep_copy(), ask.drafts, rows[at : at + 1 + len(ask.drafts)])


def _one_by_one(core: LLMatcher, drafts: Sequence[int], rows: MaskWords) -> None:
    """The rows up to the one where the parser gives up, which a text without these drafts might never reach."""
    rows[:] = 0
    for row, draft in zip(rows, (*drafts, None), strict=True):
        core.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if core.is_error():
            row[:] = 0
        if core.is_error() or draft is None or not core.consume_token(draft):
            return
