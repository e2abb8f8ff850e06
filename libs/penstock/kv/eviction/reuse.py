"""When blocks are used again: learned from what happens, per class of block.

For each class the tracker counts, over buckets of age that grow geometrically, how often a block that got that old
was used before it got older. Every use of a tracked key opens an interval and closes the one before, whether or not
the block was still stored: what the policy evicts does not bias what it learns.

From these counts comes the *rate* of a class at an age: the best chance of a use per second of keeping that a block
of that age offers, over all lengths of time that one might still keep it,

    rate(a) = max over h > a of  P(used before h | unused at a) / E(seconds until used or h | unused at a)

which is the Gittins index of keeping it (Gittins 1979): what to compare when room is scarce and a slot can be given
to another at any moment. With a hazard that falls it is the hazard now; when a hump is still to come it looks ahead.
Beckmann, Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, rank by a relative of it.

Intervals that have not ended yet count in all buckets before their own and for half of their own, as in a life table.

Only the latest intervals count, whether they have ended or not. Memory is bounded: at most `most` keys are tracked.
When they are more, only keys from half of the key space are, and so on: a sample.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence

_FIRST_EDGE_S, _GROWTH, _BUCKETS = 0.05, 1.6, 31
EDGES = (0.0, *(_FIRST_EDGE_S * _GROWTH**step for step in range(_BUCKETS - 1)))
"""Seconds of age at which the buckets begin; the last one begins at 11 hours."""
BUCKETS = len(EDGES)
_WIDTHS = tuple(end - start for start, end in itertools.pairwise(EDGES))
_PRIOR = 0.2
"""Of being used in one bucket before anything is known: a hazard that falls with age, which ranks as LRU does."""
_PRIOR_WEIGHT = 32.0
_POOL_WEIGHT = 128.0
_WINDOW = 2
"""Intervals that are remembered, in multiples of the keys that are tracked."""
_OPEN = -1


def bucket(age: float) -> int:
    """The bucket of an age in seconds."""
    return bisect.bisect_right(EDGES, age) - 1 if age > 0 else 0


class _Interval:
    """From a use of a key to the next."""

    __slots__ = ("end", "group", "key", "start")

    def __init__(self, key: bytes, group: int, start: float) -> None:
        self.key = key
        self.group = group
        self.start = start
        self.end = _OPEN
        """The bucket of age in which it ended."""


class ReuseTimes:
    """Counts intervals between uses as the module's text describes. The caller assigns each key to one of `groups`."""

    def __init__(self, groups: int, most: int = 1 << 13) -> None:
        self._groups = range(groups)
        self._most = most
        self._mask = 0
        self._window: deque[_Interval] = deque()
        self._open: dict[bytes, _Interval] = {}
        self._used = [[0] * BUCKETS for _ in self._groups]
        """Ended intervals of the window, by the bucket in which they ended."""
        self.learned = 0
        """Intervals that ended with a use, ever."""

    def __len__(self) -> int:
        return len(self._open)

    def use(self, key: bytes, group: int, now: float) -> None:
        """A block, of class `group` from now on, is stored or used. Immediate uses in a row count as one."""
        if not self._sampled(key):
            return
        before = self._open.get(key)
        if before is not None:
            age = now - before.start
            if age < EDGES[1]:
                before.group = group
                return
            before.end = bucket(age)
            self._used[before.group][before.end] += 1
            self.learned += 1
        self._open[key] = interval = _Interval(key, group, now)
        self._window.append(interval)
        if len(self._open) > self._most:
            self._thin()
        elif len(self._window) > _WINDOW * self._most:
            self._forget(self._window.popleft())

    def _sampled(self, key: bytes) -> bool:
        return not int.from_bytes(key[-4:], "little") & self._mask

    def _forget(self, interval: _Interval) -> None:
        if interval.end == _OPEN:
            del self._open[interval.key]
        else:
            self._used[interval.group][interval.end] -= 1

    def _thin(self) -> None:
        """Stops tracking half of the keys, and forgets their intervals."""
        self._mask = self._mask << 1 | 1
        for interval in self._window:
            if not self._sampled(interval.key):
                self._forget(interval)
        self._window = deque(interval for interval in self._window if self._sampled(interval.key))

    # -- what it knows

    def rates(self, now: float) -> list[list[float]]:
        """Per class and bucket of age: the best chance of a use per second of keeping."""
        return [_rates(hazards) for hazards in self.hazards(now)]

    def hazards(self, now: float) -> list[list[float]]:
        """Per class and bucket: the probability of a use within the bucket, for a block that gets that old."""
        still = [[0] * BUCKETS for _ in self._groups]
        for interval in self._open.values():
            still[interval.group][bucket(now - interval.start)] += 1
        tables = [_life_table(*counts) for counts in zip(self._used, still, strict=True)]
        pooled = _estimate(
            [sum(counts) for counts in zip(*(used for used, _ in tables), strict=True)],
            [sum(counts) for counts in zip(*(risk for _, risk in tables), strict=True)],
            [_PRIOR] * BUCKETS,
            _PRIOR_WEIGHT,
        )
        return [_estimate(used, risk, pooled, _POOL_WEIGHT) for used, risk in tables]


def _estimate(used: Sequence[float], risk: Sequence[float], before: list[float], weight: float) -> list[float]:
    """Shrinks the estimate towards the prior one, which counts as `weight` intervals."""
    return [(used[at] + weight * before[at]) / (risk[at] + weight) for at in range(BUCKETS)]


def _life_table(used: list[int], still: list[int]) -> tuple[list[int], list[float]]:
    """Uses, and how many could have been used, per bucket."""
    risk = [0.0] * BUCKETS
    older = 0
    for at in reversed(range(BUCKETS)):
        risk[at] = older + used[at] + still[at] / 2
        older += used[at] + still[at]
    return used, risk


def _rates(hazards: list[float]) -> list[float]:
    """Per bucket, the largest ratio of chance to time over all that one could still wait."""
    rates = [0.0] * BUCKETS
    for start in range(BUCKETS - 1):
        unused, time, best = 1.0, 0.0, 0.0
        for at in range(start, BUCKETS - 1):
            time += unused * _WIDTHS[at] * (1 - hazards[at] / 2)
            unused *= 1 - hazards[at]
            best = max(best, (1 - unused) / time)
        rates[start] = best
    rates[-1] = rates[-2]
    return rates
