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

Memory is bounded: at most `most` keys are tracked. When they are more, only keys from half of the key space are.
"""

from __future__ import annotations

import bisect
import itertools

_FIRST_EDGE_S, _GROWTH, _BUCKETS = 0.05, 1.6, 31
EDGES = (0.0, *(_FIRST_EDGE_S * _GROWTH**step for step in range(_BUCKETS - 1)))
"""Seconds of age at which the buckets begin; the last one is 18 hours and more, where keys are forgotten."""
BUCKETS = len(EDGES)
_WIDTHS = tuple(end - start for start, end in itertools.pairwise(EDGES))
_PRIOR = 0.2
"""Of being used in one bucket before anything is known: a hazard that falls with age, which ranks as LRU does."""
_PRIOR_WEIGHT = 32.0
_POOL_WEIGHT = 128.0
_MEMORY = 4096.0
"""Ended intervals after which a class forgets half of what it knows."""


def bucket(age: float) -> int:
    """The bucket of an age in seconds."""
    return bisect.bisect_right(EDGES, age) - 1 if age > 0 else 0


class ReuseTimes:
    """See the module's text. The caller says which class is which."""

    def __init__(self, groups: int, most: int = 1 << 14) -> None:
        self._groups = range(groups)
        self._most = most
        self._mask = 0
        self._open: dict[bytes, tuple[float, int]] = {}
        """Start and class, the earliest start first."""
        self._used = [[0.0] * BUCKETS for _ in self._groups]
        """Intervals by the bucket in which they ended with a use."""
        self._lost = [[0.0] * BUCKETS for _ in self._groups]
        """Those that were given up."""
        self._ended = [0.0] * groups
        self.learned = 0
        """Intervals that ended with a use, ever."""

    def __len__(self) -> int:
        return len(self._open)

    def use(self, key: bytes, group: int, now: float) -> None:
        """A block, of class `group` from now on, is stored or used. What is used at once again is the same use."""
        if int.from_bytes(key[-4:], "little") & self._mask:
            return
        before = self._open.pop(key, None)
        if before is not None and now - before[0] >= EDGES[1]:
            self._end(self._used, before, now)
            self.learned += 1
        self._open[key] = (now, group)
        if len(self._open) > self._most:
            self._give_up(now)

    def _end(self, counts: list[list[float]], interval: tuple[float, int], now: float) -> None:
        start, group = interval
        counts[group][bucket(now - start)] += 1
        self._ended[group] += 1
        if self._ended[group] > _MEMORY:
            self._ended[group] /= 2
            for table in (self._used, self._lost):
                table[group] = [count / 2 for count in table[group]]

    def _give_up(self, now: float) -> None:
        """Makes room: the oldest go when they are very old, else half of all keys are not tracked any more."""
        oldest = next(iter(self._open))
        if now - self._open[oldest][0] >= EDGES[-1]:
            self._end(self._lost, self._open.pop(oldest), now)
            return
        self._mask = self._mask << 1 | 1
        self._open = {
            key: interval for key, interval in self._open.items() if not int.from_bytes(key[-4:], "little") & self._mask
        }

    # -- what it knows

    def rates(self, now: float) -> list[list[float]]:
        """Per class and bucket of age: the best chance of a use per second of keeping."""
        return [_rates(hazards) for hazards in self.hazards(now)]

    def hazards(self, now: float) -> list[list[float]]:
        """Per class and bucket: the probability of a use within the bucket, for a block that gets that old."""
        still = [[0.0] * BUCKETS for _ in self._groups]
        for start, group in self._open.values():
            still[group][bucket(now - start)] += 1
        tables = [_life_table(*counts) for counts in zip(self._used, self._lost, still, strict=True)]
        pooled = _estimate(
            [sum(counts) for counts in zip(*(used for used, _ in tables), strict=True)],
            [sum(counts) for counts in zip(*(risk for _, risk in tables), strict=True)],
            [_PRIOR] * BUCKETS,
            _PRIOR_WEIGHT,
        )
        return [_estimate(used, risk, pooled, _POOL_WEIGHT) for used, risk in tables]


def _estimate(used: list[float], risk: list[float], before: list[float], weight: float) -> list[float]:
    """Shrunk towards what was known before, which counts as `weight` intervals."""
    return [(used[at] + weight * before[at]) / (risk[at] + weight) for at in range(BUCKETS)]


def _life_table(used: list[float], lost: list[float], still: list[float]) -> tuple[list[float], list[float]]:
    """Uses, and how many could have been used, per bucket."""
    risk = [0.0] * BUCKETS
    older = 0.0
    for at in reversed(range(BUCKETS)):
        out = lost[at] + still[at]
        risk[at] = older + used[at] + out / 2
        older += used[at] + out
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
