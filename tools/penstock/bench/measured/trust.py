"""The section about what guards cost and what tests notice: `penstock bench trust`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("unix_vs_tcp_ttft", "TTFT over Unix sockets : over ports of 127.0.0.1", 3),
    Line("unix_vs_tcp_tokens_per_s", "tokens/s of eight streams over Unix sockets : over ports", 3),
    Line("unix_ttft_ms", "TTFT over Unix sockets, ms"),
    Line("tcp_ttft_ms", "TTFT over ports, ms"),
    Line("mutants_noticed", "small changes of the code that decides which make a test fail, share", 3),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown; of the figures that the run has."""
    other = "" if earlier is None else f" The earlier run: {earlier.machine}."
    return f"""## Trust

`penstock bench trust`: what guards cost. `penstock up --prefill 1` of the embedded model, whose services reach each
other over Unix sockets, beside the same over ports; prompts of 64 tokens, one after the other, and eight streams.
{_changes(now)}
{figures([line for line in _LINES if now.has(line.id)], now, earlier)}

Measured on {now.machine}.{other}
"""


def _changes(now: Results) -> str:
    if not now.has("mutants_noticed"):
        return ""
    return f"""
And what tests notice: comparisons turned, bounds moved, calls left out in the scheduler, the routing policy, the block
table, the flow of a request, the names of blocks and the sampler, one at a time; the tests of each run until one fails.
{now.against("mutants_noticed")}.
"""
