"""The section about the mesh beside the bare engine."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("tokens_per_s_ratio_1", "tokens/s of one stream, mesh : bare engine"),
    Line("tokens_per_s_ratio_8", "tokens/s of eight streams, mesh : bare engine"),
    Line("ttft_added_ms", "TTFT added by the mesh, 512-token prompt, ms", 1),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run was on a busier machine: {earlier.machine}."
    return f"""## The mesh beside its engine

`penstock bench overhead`: the embedded model in float32. Every figure is a ratio or a difference against the same
engine driven in one process, in the same run.

{figures(_LINES, now, earlier)}

Measured on {now.machine}.{other}
"""
