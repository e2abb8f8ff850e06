"""Which share of requests and tokens met its target of late, from the histograms of gateways."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.scale.state import JUDGED_S

TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_BUCKET, _COUNT = "_bucket", "_count"
_MISSED = 100
"""Readings after which who was in none of them has gone."""
GatewayFigures = Mapping[str, float]
"""Samples of one gateway, those of buckets by name and upper bound."""


def figures(text: str, model: str) -> dict[str, float]:
    """What a gateway's /metrics say of a model."""
    return dict(_figures(text, model))


def _figures(text: str, model: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model_name") != model:
                continue
            if sample.name in (TTFT + _BUCKET, ITL + _BUCKET):
                yield f"{sample.name} {sample.labels['le']}", sample.value
            elif sample.name in (TTFT + _COUNT, ITL + _COUNT):
                yield sample.name, sample.value


class Gathered:
    """Counts of many, added up: of those that begin anew, or go, what they had is kept."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Mapping[str, float]]] = {}
        """Of each, in which reading it was there last."""
        self._readings = 0
        self.total: dict[str, float] = {}

    def add(self, readings: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """One more reading of each; those that were not there of late begin with what they have."""
        self._readings += 1
        for name, reading in readings.items():
            if name in self._last:
                _, last = self._last[name]
                for figure, value in reading.items():
                    before = last.get(figure, 0.0)
                    self.total[figure] = self.total.get(figure, 0.0) + (value - before if value >= before else value)
            self._last[name] = self._readings, reading
        self._last = {name: last for name, last in self._last.items() if self._readings - last[0] < _MISSED}
        return dict(self.total)


class Judge:
    """Remembers what there was within the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, figures: Mapping[str, float], now: float) -> None:
        """The newest sums."""
        self._seen.append((now, figures))
        while now - self._seen[0][0] > JUDGED_S:
            self._seen.popleft()

    def count(self, histogram: str) -> float:
        """Observations of late."""
        return self._more(histogram + _COUNT)

    def met(self, histogram: str, target_s: float) -> float:
        """Their share that is within `target_s`, as far as buckets tell: the part of the one that it lies in."""
        total = self.count(histogram)
        if total <= 0:
            return 1.0
        prefix = f"{histogram}{_BUCKET} "
        bounds = sorted(float(name.removeprefix(prefix)) for name in self._seen[-1][1] if name.startswith(prefix))
        below_s, below = 0.0, 0.0
        for bound, name in ((bound, prefix + _le(bound)) for bound in bounds):
            within = self._more(name)
            if bound >= target_s:
                part = 0.0 if bound == float("inf") else (target_s - below_s) / (bound - below_s)
                return (below + part * (within - below)) / total
            below_s, below = bound, within
        return 1.0

    def _more(self, name: str) -> float:
        return self._seen[-1][1].get(name, 0.0) - self._seen[0][1].get(name, 0.0) if self._seen else 0.0


def _le(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)
