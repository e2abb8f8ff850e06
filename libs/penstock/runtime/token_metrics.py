"""Counters and histograms of what happens with every token or request: cheap, and for one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenCount:
    """A count of what happens with every token: without the lock of `Counter`, so for one thread."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self) -> None:
        """One more."""
        self.value += 1


class TokenCounter(Collector):
    """Such counts, by one label."""

    def __init__(self, name: str, what: str, label: str) -> None:
        self._family = name, what, label
        self._counts: dict[str, TokenCount] = {}

    def labels(self, value: str) -> TokenCount:
        """The count of one value of the label."""
        return self._counts.setdefault(value, TokenCount())

    def collect(self) -> Iterator[Metric]:
        """One family."""
        name, what, label = self._family
        family = CounterMetricFamily(name, what, labels=[label])
        for value, count in self._counts.items():
            family.add_metric([value], count.value)
        yield family


class TokenBuckets:
    """Values that are observed often, by bucket; for one thread as well."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ones of the buckets, in order."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last is for what is longer than all."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class TokenHistogram(Collector):
    """A histogram of such values."""

    def __init__(self, names: Sequence[str], what: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        """It has several names where readers look for it under each."""
        self._names, self._what, self._labels = names, what, labels
        self._bounds = bounds
        self._found: dict[tuple[str, ...], TokenBuckets] = {}

    def labels(self, *values: str) -> TokenBuckets:
        """The buckets of one value of each label."""
        if values not in self._found:
            self._found[values] = TokenBuckets(self._bounds)
        return self._found[values]

    def put(self, buckets: TokenBuckets, *values: str) -> None:
        """Somebody else fills the buckets of these values of the labels."""
        self._found[values] = buckets

    def collect(self) -> Iterator[Metric]:
        """A family for each name."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name in self._names:
            family = HistogramMetricFamily(name, self._what, labels=self._labels)
            for values, found in self._found.items():
                family.add_metric(values, list(zip(bounds, accumulate(found.counts), strict=True)), found.sum)
            yield family
