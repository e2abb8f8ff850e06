"""From samples to figures. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.bench.e2e.servers import MESH, PEERS
from penstock.bench.e2e.subjects import ServerRow, ServerSample
from penstock.bench.harness import Figure, figure, missing


@dataclass(frozen=True, slots=True)
class BesideBest:
    """A value of ours beside the best peer's."""

    id: str
    cell: str
    value: str
    goal: float | None
    lower_is_better: bool = True


COMPARED = (
    *(
        BesideBest(f"agent_tokens_per_s_vs_best_{count}", f"agents_{count}", "output_token_throughput", 1.2, False)
        for count in (1, 4, 8, 16)
    ),
    *(
        BesideBest(
            f"agent_turn{turn}_ttft_vs_best_{count}", f"agents_{count}", f"time_to_first_token_turn{turn}_p50", goal
        )
        for turn, goal in ((1, 1.0), (2, 0.5))
        for count in (1, 4, 8, 16)
    ),
    BesideBest("fanout16_tokens_per_s_vs_best", "fanout_16", "output_token_throughput", 1.2, False),
    BesideBest("fanout16_ttft_vs_best", "fanout_16", "time_to_first_token_children_p50", 0.5),
    BesideBest("mixed_tokens_per_s_vs_best", "mixed_4", "output_token_throughput", 1.2, False),
    BesideBest("mixed_itl_p90_vs_best", "mixed_4", "inter_token_gap_streams_p90", 0.5),
    *(
        BesideBest(f"plain_tokens_per_s_vs_best_{count}", f"plain_{count}", "output_token_throughput", 1.2, False)
        for count in (1, 8, 32)
    ),
    BesideBest("coding_tokens_per_s_vs_best", "coding", "output_token_throughput", None, False),
    BesideBest("coding_first_ttft_vs_best", "coding", "time_to_first_token_first_p50", None),
    BesideBest("coding_later_ttft_vs_best", "coding", "time_to_first_token_later_p50", None),
    BesideBest("agent_turn_ttft_after_restart_vs_best", "restart", "time_to_first_token_after_restart", 0.1),
    BesideBest("agent_pause_after_kill_vs_best", "kill", "pause", 0.1),
    BesideBest("agent_turn1_ttft_after_rest_vs_best", "rest", "time_to_first_token_after_rest", 1.0),
    BesideBest("mesh_cpu_s_per_1k_vs_best", "agents_8", "cpu_s_per_1k", 1.0),
    BesideBest("mesh_memory_vs_best", "agents_8", "memory_mb", 1.0),
    BesideBest("mesh_memory_vs_best_16", "agents_16", "memory_mb", 1.0),
)
_UNITS = {
    "output_token_throughput": "tokens/s",
    "cached_share": "ratio",
    "cpu_s_per_1k": "s",
    "memory_mb": "MB",
    "memory_grown_mb": "MB",
    "memory_vs_own_part": "ratio",
    "refusals": "requests",
}
_KEPT = (
    "output_token_throughput",
    "time_to_first_token_p50",
    "time_to_first_token_p90",
    "time_to_first_token_turn1_p50",
    "time_to_first_token_turn1_max",
    "time_to_first_token_turn2_p50",
    "time_to_first_token_children_p50",
    "time_to_first_token_first_p50",
    "time_to_first_token_later_p50",
    "time_to_first_token_later_p90",
    "inter_token_latency_p50",
    "inter_token_latency_p90",
    "inter_token_gap_p90",
    "inter_token_gap_streams_p90",
    "request_latency_p50",
    "request_latency_p90",
    "cached_share",
    "refusals",
    "schedule_delay_p99",
    "cpu_s_per_1k",
    "memory_mb",
    "ready_again",
    "time_to_first_token_last_before",
    "time_to_first_token_after_restart",
    "pause",
    "time_to_first_token_after_kill",
    "time_to_first_token_before_rest",
    "time_to_first_token_after_rest",
    "memory_grown_mb",
    "memory_vs_own_part",
)


def compared(rows: Sequence[ServerRow], suffix: str = "") -> list[Figure]:
    """All comparisons of cells that were measured; `suffix` ends their ids."""
    measured = {row.cell for row in rows if row.server == MESH}
    return [
        beside_best(comparison, [row for row in rows if row.cell == comparison.cell], suffix)
        for comparison in COMPARED
        if comparison.cell in measured
    ]


def beside_best(comparison: BesideBest, rows: Sequence[ServerRow], suffix: str = "") -> Figure:
    """Ours : the best peer's, round by round; the best is the one beside which ours looks worst."""
    id, goal = comparison.id + suffix, comparison.goal
    rivals = [row for row in rows if row.server in PEERS]
    left_out = [f"{row.server}: {row.absent}" for row in rows if row.absent and row.server in (MESH, *PEERS)]
    measured = [(row, ratios) for row in rivals if (ratios := row.ratios(comparison.value))]
    if not measured:
        return missing(id, "ratio", "; ".join(left_out) or "no peer was measured", goal)
    worst = max if comparison.lower_is_better else min
    row, ratios = worst(measured, key=lambda one: statistics.median(one[1]))
    against = "; without ".join([f"best peer: {row.server}", *left_out])
    return figure(id, ratios, "ratio", against, goal, lower_is_better=comparison.lower_is_better)


def shared_prefix(rows: Sequence[ServerRow], suffix: str = "") -> list[Figure]:
    """What a further session with a common prefix adds to the mesh's memory, if that was measured."""
    id, value, against = "shared_prefix_memory_ratio", "memory_vs_own_part", "the bytes of the session's own part"
    return [
        figure(id + suffix, samples, "ratio", against)
        for row in rows
        if row.server == MESH and (samples := row.of(value))
    ]


def scales(rows: Iterable[ServerRow], shape: str) -> list[Figure]:
    """What every server gave in every cell, for scale."""
    return [
        figure(f"{row.cell}_{shape}_{row.server}_{value}", samples, _UNITS.get(value, "ms"), "for scale")
        for row in merged(rows)
        for value in _KEPT
        if (samples := row.of(value))
    ]


def merged(rows: Iterable[ServerRow]) -> list[ServerRow]:
    """One row for each server of a cell: the mesh may have taken part in several sittings."""
    together: dict[tuple[str, str], list[ServerSample]] = {}
    for row in rows:
        together.setdefault((row.cell, row.server), []).extend(row.samples)
    return [ServerRow(cell, server, samples) for (cell, server), samples in together.items()]
