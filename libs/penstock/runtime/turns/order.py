"""Who computes next on shared cores. Pure: rows of the table in, yes or no out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    """What a worker does with the cores."""

    AWAY = 0
    WAITING = 1
    COMPUTING = 2


@dataclass(frozen=True, slots=True)
class CoreClaim:
    """What a worker computes with, as long as it runs."""

    cores: int
    """Those that it may run on, a bit for each."""
    threads: int
    """Of one step."""
    group: int = 0
    """Its control group, if that limits processor time; 0: nothing does."""
    quota: int = 0
    """Cores that the group's limit is worth."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker and where it stands."""

    claim: CoreClaim
    stage: Stage = Stage.AWAY
    decodes: bool = False
    """The turn that it wants, or has, brings tokens for streams; otherwise it is a slice of prompts."""
    owed: bool = True
    """A slice of prompts of another worker was computed since its last turn."""
    due: float = 0.0
    """Others count with it until then, on the monotonic clock: it is stopped, dead or far too slow if it says nothing
    more."""


def crowded(claims: Sequence[CoreClaim]) -> bool:
    """Whether these workers have more threads than cores when they compute at the same time: all together, or some of
    them on the cores that only those may use (Hall's condition). More workers are never less crowded."""
    threads: Counter[int] = Counter()
    for claim in claims:
        threads[claim.cores] += claim.threads
    unions = {0}
    for cores in threads:  # few differ
        unions |= {cores | union for union in unions}
    if any(
        sum(count for cores, count in threads.items() if not cores & ~union) > union.bit_count() for union in unions
    ):
        return True
    groups = {claim.group: claim.quota for claim in claims if claim.group}
    return any(
        sum(claim.threads for claim in claims if claim.group == group) > quota for group, quota in groups.items()
    )


def meet(one: CoreClaim, other: CoreClaim) -> bool:
    """Whether two workers may run on the same core, or out of the same allowance."""
    return bool(one.cores & other.cores) or (one.group != 0 and one.group == other.group)


def may_begin(mine: Standing, others: Iterable[Standing], now: float) -> bool:
    """Whether a worker that waits may compute now, beside those that compute and those that come before it.

    `others` are those that it meets. One of its own kind holds nothing up, nor does one whose time is over.
    """
    before = [
        other.claim
        for other in others
        if other.decodes != mine.decodes
        and now < other.due
        and (other.stage is Stage.COMPUTING or (other.stage is Stage.WAITING and _key(other) < _key(mine)))
    ]
    return not before or not crowded([mine.claim, *before])


def _key(waiting: Standing) -> int:
    """Sorts those that wait. Streams go before prompts, but get one turn for each slice of prompts that waits. So
    nobody starves: each kind waits for one turn of the other."""
    if waiting.decodes:
        return 0 if waiting.owed else 2
    return 1
