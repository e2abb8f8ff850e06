"""What a step may be, what a plan for it depends on, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.engine.scheduling.leftover import ANY_LEFTOVER, Leftover


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of the size of a step, and the number of tokens in a page."""

    max_batch_tokens: int
    max_running: int
    block_size: int
    flights: int = 1
    """Steps that are computed at a time, of different sequences: they share the streams."""

    def pages_for(self, tokens: int) -> int:
        """Number of pages that `tokens` tokens need."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    """How many tokens of prompts a step may compute."""

    beside: int | None = None
    """Most of them in a step with decode rows; None: as many as fit."""
    alone: int | None = None
    """Most of them in a step without; None: as many as fit."""
    whole: int = 0
    """A step with decode rows and no other prompt computes all of one that begins, if that is no more than this."""
    enough: int | None = None
    """Where a prompt ends in a step that has at least so many of them, no other follows; None: the step is filled."""


ANY_ROOM = PromptRoom()
"""As many as fit."""


class Schedulable(Protocol):
    """The part of a sequence that the policy reads."""

    @property
    def ticket(self) -> int:
        """Names it."""
        ...

    @property
    def place(self) -> int:
        """In line: lower is earlier."""
        ...

    @property
    def length(self) -> int:
        """All known tokens."""
        ...

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is still to be computed; 1 is a decode step."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """Held by the sequence."""
        ...

    @property
    def busy(self) -> bool:
        """A step that is being computed has it: nothing about it can change."""
        ...

    @property
    def next_key(self) -> bytes | None:
        """Names the block that its next token belongs to; None when that is its own, whatever others compute."""
        ...

    def visible(self, start: int) -> int:
        """The first of its tokens from `start` on that is of a picture whose embeddings are not there yet: no step can
        compute it now. Behind all tokens where there is none."""
        ...


@dataclass(slots=True)
class Portion:
    """One sequence's share of a step: consecutive tokens, and drafts behind them."""

    ticket: int
    known: int
    """Known tokens to compute, starting at the first one without KV that is not copied."""
    new_pages: int
    drafts: int = 0
    copied: int = 0
    """Known tokens before them that can be copied."""


@dataclass(slots=True)
class StepPlan:
    """The changes to make for the next step, in the order of the fields. Tickets name the sequences."""

    preempt: list[int] = field(default_factory=list)
    """Running sequences that lose their pages and go back to the line."""
    strip: list[int] = field(default_factory=list)
    """Waiting or loading sequences that lose their loaded pages and keep their place."""
    admit: list[int] = field(default_factory=list)
    """Those of the line that start running."""
    portions: list[Portion] = field(default_factory=list)
    settled: bool = True
    """As long as those that do not yield stay the same, those that do get nothing else."""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan depends on. The lines are in order of their places."""

    limits: StepLimits
    free: int
    """Free pages."""
    running: Sequence[Schedulable]
    """Each holds pages for all its known tokens but possibly the last."""
    waiting: Sequence[Schedulable]
    """Some hold pages that a source has filled."""
    loading: Sequence[Schedulable] = ()
    """Not in line yet; a source is filling their pages."""
    drafts: Mapping[int, int] = field(default_factory=dict)
    """Proposed tokens at hand, by ticket."""
    copyable: Callable[[Any], int] = lambda _live: 0
    """How many tokens a sequence of the lines can copy instead of computing them: the leading ones of its next block,
    never its last token."""
    holds: Callable[[int], int] = lambda _page: 1
    """How many hold a page: sequences, sinks and copies. It comes free when all have given it back."""
    stalled: bool = False
    """No sequence could run for a while, so the plan may take even pages that are being filled."""
    room: PromptRoom = ANY_ROOM
    leftover: Leftover = ANY_LEFTOVER
    reserve: int = 0
    """Pages that sequences which yield leave free, for those that come."""
