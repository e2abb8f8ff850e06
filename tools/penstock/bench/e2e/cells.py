"""Which loads each server gets, and what is taken from the answers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.bench.e2e.answers import TimedAnswer, output_token_throughput, percentile
from penstock.bench.e2e.loads import AgentLoad, Asking, FanOutLoad, MixedLoad, PlainLoad, PromptSource, TimedAnswers
from penstock.bench.engine.shapes import LlamaShape

Values = Mapping[str, float]
"""By AIPerf's names; times in ms."""


@dataclass(frozen=True, slots=True)
class LoadCell:
    """A load with a name."""

    name: str
    load: AgentLoad | FanOutLoad | MixedLoad | PlainLoad

    async def run(self, ask: Asking, shape: LlamaShape, round: int) -> TimedAnswers:
        """Every server gets the same prompts in a round, and in no two rounds the same."""
        return await self.load.run(ask, PromptSource(shape.vocab, f"{self.name}/{round}"))


_FULL = (
    *(LoadCell(f"agents_{sessions}", AgentLoad(sessions=sessions)) for sessions in (1, 4, 8, 16)),
    LoadCell("fanout_16", FanOutLoad(children=16)),
    LoadCell("mixed_4", MixedLoad(streams=4)),
    *(LoadCell(f"plain_{streams}", PlainLoad(streams=streams)) for streams in (1, 8, 32)),
)
_QUICK = (
    LoadCell("agents_1", AgentLoad(sessions=1, turns=2, output=32)),
    LoadCell("agents_8", AgentLoad(sessions=8, turns=2, output=32)),
    LoadCell("fanout_16", FanOutLoad(children=16, output=16)),
    LoadCell("mixed_4", MixedLoad(streams=4, output=96)),
    LoadCell("plain_8", PlainLoad(streams=8, output=32)),
)
NAMES = tuple(cell.name for cell in _FULL)


def cells(quick: bool, wanted: Iterable[str] = ()) -> list[LoadCell]:
    """Those that are wanted, in order; all without names. `quick` has fewer and shorter ones."""
    names = set(wanted)
    return [cell for cell in (_QUICK if quick else _FULL) if not names or cell.name in names]


def values(answers: TimedAnswers) -> dict[str, float]:
    """All that a figure could be made of: over everything, and of TTFT over each part too."""
    everything = list(chain.from_iterable(answers.values()))
    found = {"output_token_throughput": output_token_throughput(everything)}
    found |= _times(everything, "")
    if "streams" in answers:  # of which the long prompts beside them are no part
        found |= _times(answers["streams"], "_streams")
    for name, part in answers.items():
        found |= _spread(f"time_to_first_token_{name}", [answer.time_to_first_token for answer in part])
    found["refusals"] = float(sum(answer.refusals for answer in everything))
    prompt = sum(answer.prompt_tokens for answer in everything)
    found["cached_share"] = sum(answer.cached_tokens for answer in everything) / max(1, prompt)
    return found


def _times(answers: Sequence[TimedAnswer], part: str) -> dict[str, float]:
    several = [answer for answer in answers if len(answer.ids) > 1]
    return {
        **_spread(f"time_to_first_token{part}", [answer.time_to_first_token for answer in answers]),
        **_spread(f"inter_token_latency{part}", [answer.inter_token_latency for answer in several]),
        **_spread(f"inter_token_gap{part}", [gap for answer in several for gap in answer.gaps]),
        **_spread(f"request_latency{part}", [answer.request_latency for answer in answers]),
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    made: Mapping[str, Callable[[Sequence[float]], float]] = {
        "avg": statistics.fmean,
        "p50": statistics.median,
        "p90": lambda all: percentile(all, 90),
        "p99": lambda all: percentile(all, 99),
        "max": max,
    }
    return {f"{name}_{end}": make(seconds) * 1e3 for end, make in made.items()} if seconds else {}
