"""Counters and histograms of what happens with every token: cheap, and for one thread."""

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


class TokenSeconds:
    """Seconds that are observed with every token, by bucket; for one thread as well."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ones of the buckets, in order."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last is for what is longer than all."""
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds


class TokenHistogram(Collector):
    """A histogram of such seconds, by one label."""

    def __init__(self, name: str, what: str, label: str, bounds: Sequence[float]) -> None:
        self._family = name, what, label
        self._bounds = bounds
        self._seconds: dict[str, TokenSeconds] = {}

    def labels(self, value: str) -> TokenSeconds:
        """The seconds of one value of the label."""
        return self._seconds.setdefault(value, TokenSeconds(self._bounds))

    def collect(self) -> Iterator[Metric]:
        """One family."""
        name, what, label = self._family
        family = HistogramMetricFamily(name, what, labels=[label])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for value, seconds in self._seconds.items():
            family.add_metric([value], list(zip(bounds, accumulate(seconds.counts), strict=True)), seconds.sum)
        yield family
