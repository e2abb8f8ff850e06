"""The section about cores that are shared, and about contexts."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("beside_busy_vs_alone", "tokens/s of one stream beside a busy process with a thread on each core : alone"),
    Line("kv_read_rate_vs_weights", "bytes/s of keys and values read in a step : of weights, 8 streams"),
    *(
        Line(f"step_ms_8_{context}", f"a step of 8 streams, {context} tokens of context each, ms", 1)
        for context in (16, 512, 2000)
    ),
    Line("step_common_prefix_vs_own", "a step of 8 streams, 2,000 tokens each: 1,952 in common : none"),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## Shared cores, and contexts

`penstock bench cores`: the bare engine with the shape of 135 million parameters in bfloat16, two threads. A fair share
of cores on which another process computes as much is a half. Streams have nothing in common where the line does not
say that they do.

{figures(_LINES, now, earlier)}

Measured on {now.machine}.{other}
"""
