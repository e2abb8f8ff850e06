"""The masks of a step: for every guided text, what may follow it and each of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from penstock.grammar.guide import Guide
from penstock.grammar.matcher import GrammarLeft
from penstock.grammar.tokenizer import MaskWords

_FEW_WORDS = 1 << 14
"""Words of masks that are made one after the other: it takes longer to wake threads for so few."""


@dataclass(slots=True)
class MaskAsk:
    """Asks for the masks behind `tokens` (prompt and output, of which the guide may have taken the first before) and
    behind each of the `drafts`."""

    guide: Guide
    tokens: Sequence[int]
    drafts: tuple[int, ...] = ()


class StepMasks:
    """The masks of a step."""

    def __init__(self, asks: Sequence[MaskAsk], words: int, others: int = 0) -> None:
        """Room for those of `asks`, `words` for each, and for `others` behind them that are not made here."""
        self.asks = asks
        self.first: list[int] = []
        """Number of each text's first row."""
        count = 0
        for ask in asks:
            self.first.append(count)
            count += 1 + len(ask.drafts)
        self.made = count
        """Number of rows that are made here: for each text one, and one for each of its drafts."""
        self.rows: MaskWords = np.empty((count + others, words), dtype=np.int32)
        """[rows, words]"""
        self.failed: dict[int, GrammarLeft] = {}
        """Texts, by their number, that can't go on. Their rows allow everything."""


class MaskMaker:
    """Computes masks, of many texts at a time."""

    def __init__(self, threads: int) -> None:
        """`threads`: for masks of many texts over large vocabularies."""
        self._threads = threads
        self._executor: LLExecutor | None = None

    def masks(self, asks: Sequence[MaskAsk]) -> StepMasks:
        """Takes the asks' new tokens, and answers the asks."""
        made = StepMasks(asks, asks[0].guide.tokenizer.words)
        self.fill(made)
        return made

    def fill(self, made: StepMasks) -> None:
        """Takes the new tokens of the masks' asks, and answers the asks."""
        own = made.rows[: made.made]
        own[:] = 0
        able: list[tuple[MaskAsk, int]] = []
        for number, ask in enumerate(made.asks):
            try:
                ask.guide.follow(ask.tokens)
                able.append((ask, made.first[number]))
            except GrammarLeft as error:
                made.failed[number] = error
        self._fill(able, own)
        for number, (ask, at) in enumerate(zip(made.asks, made.first, strict=True)):
            rows = made.rows[at : at + 1 + len(ask.drafts)]
            if number not in made.failed:
                try:
                    ask.guide.finish(rows)
                except GrammarLeft as error:
                    made.failed[number] = error
            if number in made.failed:
                rows[:] = -1

    def _fill(self, asks: Sequence[tuple[MaskAsk, int]], rows: MaskWords) -> None:
        """What the grammars allow, for asks whose first row is known; nothing behind a draft that is not legal, or
        where a parser gives up. Drafts are tried on copies."""
        if rows.size <= _FEW_WORDS:
            for ask, at in asks:
                core = ask.guide.matcher.core
                _one_by_one(core.deep_copy() if ask.drafts else core, ask.drafts, rows[at : at + 1 + len(ask.drafts)])
            return
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        plain = [(ask.guide.matcher.core, at) for ask, at in asks if not ask.drafts]
        drafted = [(ask.guide.matcher.core.deep_copy(), at, list(ask.drafts)) for ask, at in asks if ask.drafts]
        address, width, count = rows.ctypes.data, rows.strides[0], len(rows)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, width, count)
        for core, at in plain:
            if core.is_error():
                rows[at] = 0
        if drafted:  # this rolls the copies back, which then are of no use any more
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, width, count)
        for (core, at, _), ask in zip(drafted, (ask for ask, _ in asks if ask.drafts), strict=True):
            if core.is_error():
                own = rows[at : at + 1 + len(ask.drafts)]
                own[:] = 0
                _one_by_one(ask.guide.matcher.core.deep_copy(), ask.drafts, own)


def _one_by_one(core: LLMatcher, drafts: Sequence[int], rows: MaskWords) -> None:
    """The rows up to the one where the parser gives up, which a text without these drafts might never reach."""
    address, width = rows.ctypes.data, rows.strides[0]
    for number, draft in enumerate((*drafts, None)):
        core.unsafe_compute_mask_ptr(address + number * width, width)
        if core.is_error():
            rows[number] = 0
            return
        if draft is None or not core.consume_token(draft):
            return
