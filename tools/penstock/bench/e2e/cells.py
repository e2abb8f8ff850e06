"""Which loads each server gets, and what is taken from the answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.bench.e2e.loads import AgentLoad, CodingLoad, FanOutLoad, LoadStage, MixedLoad, Parts, PlainLoad
from penstock.load.distribution import Block, spread
from penstock.load.metrics import MetricTerms, metrics
from penstock.load.records import LoadRecord

Values = Mapping[str, float]
"""By AIPerf's names; times in ms."""
_ENDS = ("avg", "p50", "p90", "p99", "max")
_TIMES = ("time_to_first_token", "inter_token_latency", "inter_token_gap", "request_latency")


@dataclass(frozen=True, slots=True)
class LoadCell:
    """A load with a name."""

    name: str
    load: AgentLoad | CodingLoad | FanOutLoad | MixedLoad | PlainLoad

    async def run(self, stage: LoadStage, round: int) -> Parts:
        """Every server gets the same prompts in a round, and in no two rounds the same."""
        return await self.load.run(stage, f"{self.name}/{round}")


_FULL = (
    *(LoadCell(f"agents_{sessions}", AgentLoad(sessions=sessions)) for sessions in (1, 4, 8, 16)),
    LoadCell("fanout_16", FanOutLoad(children=16)),
    LoadCell("mixed_4", MixedLoad(streams=4)),
    *(LoadCell(f"plain_{streams}", PlainLoad(streams=streams)) for streams in (1, 8, 32)),
    LoadCell("coding", CodingLoad(sessions=16, turns=12)),
)
_QUICK = (
    LoadCell("agents_1", AgentLoad(sessions=1, turns=2, output=32)),
    LoadCell("agents_8", AgentLoad(sessions=8, turns=2, output=32)),
    LoadCell("fanout_16", FanOutLoad(children=16, output=16)),
    LoadCell("mixed_4", MixedLoad(streams=4, output=96)),
    LoadCell("plain_8", PlainLoad(streams=8, output=32)),
    LoadCell("coding", CodingLoad(sessions=8, turns=3)),
)
NAMES = tuple(cell.name for cell in _FULL)


def cells(quick: bool, wanted: Iterable[str] = ()) -> list[LoadCell]:
    """Those that are wanted, in order; all without names. `quick` has fewer and shorter ones."""
    names = set(wanted)
    return [cell for cell in (_QUICK if quick else _FULL) if not names or cell.name in names]


def values(parts: Parts) -> dict[str, float]:
    """All that a figure could be made of: over everything, and of TTFT over each part too."""
    records = [*chain.from_iterable(parts.values())]
    measured = metrics(records, MetricTerms(turns={}, begins={}, has_sessions=False))
    found = {"output_token_throughput": float(measured["output_token_throughput"]["avg"])}
    for name in _TIMES:
        found |= _spread(name, measured.get(name))
    if "streams" in parts:  # of which the long prompts beside them are no part
        gaps = (1e3 * gap for record in parts["streams"] for gap in record.token_gaps)
        found |= _spread("inter_token_gap_streams", spread(gaps, "ms"))
    for name, part in parts.items():
        found |= _spread(f"time_to_first_token_{name}", spread((1e3 * (one.ttft or 0.0) for one in part), "ms"))
    found["refusals"] = float(sum(record.refusals for record in records))
    found["cached_share"] = cached_share(records)
    found["schedule_delay_p99"] = float(measured["schedule_delay"]["p99"])
    return found


def cached_share(records: Sequence[LoadRecord]) -> float:
    """Of the tokens of all prompts, as the server says."""
    prompt = sum(record.prompt_tokens or 0 for record in records)
    return sum(record.cached_tokens or 0 for record in records) / max(1, prompt)


def _spread(name: str, block: Block | None) -> dict[str, float]:
    return {f"{name}_{end}": float(block[end]) for end in _ENDS} if block else {}
