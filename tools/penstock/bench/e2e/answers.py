"""One request as its client saw it, in AIPerf's words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class TimedAnswer:
    """What came back, and when. Seconds on the clock of `time.perf_counter`."""

    asked: float
    """When the request was first sent."""
    ids: list[int] = field(default_factory=list)
    """The tokens."""
    times: list[float] = field(default_factory=list)
    """When each of them came; those of one event came together."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, as the server says."""
    refusals: int = 0
    """How often the server asked to try again later."""

    def gained(self, ids: Sequence[int], now: float) -> None:
        """An event brought these tokens."""
        self.ids += ids
        self.times += [now] * len(ids)

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.times[0] - self.asked

    @property
    def request_latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.asked

    @property
    def inter_token_latency(self) -> float:
        """Seconds between tokens on the mean. Needs two tokens."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the one before; 0 within an event."""
        return [later - earlier for earlier, later in pairwise(self.times)]


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of the values lie, between neighbours by interpolation. Needs a value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def output_token_throughput(answers: Sequence[TimedAnswer]) -> float:
    """Tokens/s of all answers together, from the first request sent to the last token."""
    seconds = max(answer.times[-1] for answer in answers) - min(answer.asked for answer in answers)
    return sum(len(answer.ids) for answer in answers) / seconds
