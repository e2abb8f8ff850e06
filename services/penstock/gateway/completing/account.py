"""The cost of one choice and the plans that were tried for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.gateway.request.work import Assignment, Lost, Promised, PromptUse
from penstock.runtime.drafts import DraftAccount


@dataclass(slots=True)
class TriedPlan:
    """One attempt, for those who ask later what became of a request."""

    chosen: Assignment
    asked_at: float
    """`time.perf_counter`, like all times here."""
    planned_at: float
    start: int
    """Number of tokens of the answer when it began."""
    lost: Lost | None = None
    """How it failed."""
    lost_at: float = 0.0


@dataclass(slots=True)
class ChoiceAccount:
    """The cost of a choice, as its workers counted it."""

    use: PromptUse | None = None
    """The count of the first worker that computed the prompt; None until one has reported."""
    again: Counter[str] = field(default_factory=Counter)
    """Tokens by source that further workers counted, which computed or fetched the prompt again."""
    recalled: int = 0
    """Tokens that were generated before the choice began, for the same request."""
    received: int = 0
    """Tokens of workers, also those that came again."""
    defects: int = 0
    """Reports whose token count differs from the number of tokens that the worker was given."""
    drafts: DraftAccount = field(default_factory=DraftAccount)
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, of the worker whose count of the prompt is `use`."""
    planned_at: float | None = None
    """`time.perf_counter` at the last plan before the first token."""
    decoding_at: float | None = None
    """The same at the first token that came from a decode worker."""
    attempts: list[TriedPlan] = field(default_factory=list)
    """The first of them."""
    replans: int = 0
    promised: Promised = field(default_factory=Promised)
    """The store's promise, as last reported."""
