"""What a soak found, as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.bench.harness import Figure, figure, missing
from penstock.bench.soak.tally import SoakTally

_SLOWER = 1.1
_PAUSE_S = 15.0
_GROWTH_MB = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """Of one run."""

    seed: int
    tally: SoakTally
    faults: Mapping[str, int]
    """By what and whom."""
    leaks: Sequence[str]
    growth: Mapping[str, float]
    """Bytes, by the kind of service."""
    median_ratio: float
    tail_ratio: float
    """Of latencies, the last calm requests : the first."""
    seconds: float
    complaints: Sequence[str] = ()
    """The last errors that services have logged."""
    defects: Sequence[str] = ()
    """Of all these the first that say of a task that it failed, or was left behind."""

    @property
    def problems(self) -> list[str]:
        """Why it is not as it should be, for people; empty: it is."""
        leaks = (f"leaked: {leak}" for leak in self.leaks)
        return [*leaks, *(f"a defect: {line}" for line in self.defects), *self.tally.problems]

    def figures(self) -> list[Figure]:
        """All of them."""
        tally, struck = self.tally, sum(self.faults.values())
        of = f"{tally.done} requests, {struck} faults, seed {self.seed}"
        growth = {kind: grown / 1e6 for kind, grown in self.growth.items()}
        grown_by = "the later half of the longest life of each kind"
        return [
            _at_most("streams_lost", tally.lost, "", of, 0),
            _at_most("tokens_wrong", tally.wrong, "", f"{tally.tokens} tokens", 0),
            _at_most("leaks", len(self.leaks), "", "the mesh before the faults", 0),
            _at_most("defects_logged", len(self.defects), "", "of tasks that failed or were left behind", 0),
            _at_most("max_pause_s", tally.pause_s, "s", "between two tokens of a stream", _PAUSE_S),
            _at_most("memory_growth_mb", max(growth.values()), "MB", grown_by, _GROWTH_MB)
            if growth
            else missing("memory_growth_mb", "MB", "no process got old enough", _GROWTH_MB),
            _at_most("latency_last_vs_first", self.median_ratio, "ratio", "the same requests at the start", _SLOWER),
            _scale("latency_p95_last_vs_first", self.tail_ratio, "ratio"),
            _scale("max_first_token_s", tally.first_s, "s"),
            _scale("requests_done", tally.done, ""),
            _scale("clients_left", tally.left, ""),
            _scale("asked_again", tally.again, ""),
            _scale("streams_resumed", tally.resumed, ""),
            _scale("errors_told", tally.errors, ""),
            _scale("faults", struck, ""),
            _scale("requests_per_s", tally.done / self.seconds, "1/s"),
            *(_scale(f"memory_growth_mb_{kind}", grown, "MB") for kind, grown in growth.items()),
        ]


def _at_most(id: str, value: float, unit: str, against: str, goal: float) -> Figure:
    return figure(id, [value], unit, against, goal, lower_is_better=True)


def _scale(id: str, value: float, unit: str) -> Figure:
    return figure(id, [value], unit, "for scale")
