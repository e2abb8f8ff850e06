"""The section about turns on shared cores: `penstock bench e2e` of two forms of the mesh."""

from __future__ import annotations

from penstock.bench.measured.results import Results, table, written

_APART, _TURNS = "mesh_disaggregated", "mesh_turns"
_LINES = {
    "fanout_16_135m_{}_output_token_throughput": "tokens/s, one agent and its 16 children",
    "fanout_16_135m_{}_time_to_first_token_children_p50": "TTFT of the children, ms",
    "fanout_16_135m_{}_inter_token_gap_p90": "p90 between tokens, ms",
    "mixed_4_135m_{}_output_token_throughput": "tokens/s, streams beside long prompts",
    "mixed_4_135m_{}_inter_token_gap_streams_p90": "p90 between tokens there, ms",
    "mixed_4_135m_{}_time_to_first_token_p90": "p90 of TTFT there, ms",
    "agents_8_135m_{}_output_token_throughput": "tokens/s, 8 agents",
    "agents_8_135m_{}_time_to_first_token_turn2_p50": "TTFT of second turns, ms",
    "agents_8_135m_{}_inter_token_gap_p90": "p90 between tokens, ms",
}


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    rows = []
    for line, words in _LINES.items():
        apart, turns = line.format(_APART), line.format(_TURNS)
        without, with_them = now.value(apart), now.value(turns)
        if without is not None and with_them is not None:
            rows.append([words, now.rate(apart), now.rate(turns), written(with_them / without, 2)])
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## Turns on shared cores

Whether it pays that a prefill and a decode worker on the same cores [take turns](design/baton.md): the disaggregated
mesh of the section above without turns, as it comes, and with them (`--baton auto`), in rounds that take turns
themselves.

```
penstock bench e2e --servers mesh_disaggregated --servers mesh_turns \\
    --cells agents_8 --cells fanout_16 --cells mixed_4 --json > turns.json
```

{table(["figure", "without", "with turns", "with : without"], rows)}

Measured on {now.machine}.{other}
"""
