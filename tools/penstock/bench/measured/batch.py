"""The section about batches beside live requests: `penstock bench batch`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("batch_idle_share_used", "share of what live requests leave idle that the batch uses"),
    Line("batch_live_itl_p90_ratio", "ITL p90 of live requests, with the batch : without"),
    Line("batch_live_ttft_p90_ratio", "TTFT p90 of live requests, with the batch : without"),
    Line("batch_live_itl_p90_ms", "ITL p90 of live requests without the batch, ms", 1),
    Line("batch_live_ttft_p90_ms", "TTFT p90 of live requests without the batch, ms", 1),
    Line("batch_tokens_per_s_alone", "tokens/s of the batch alone", 0),
    Line("batch_tokens_per_s_beside", "tokens/s of the batch beside live requests", 0),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## Batches

`penstock bench batch`: live requests that take half of the mesh's time, alone and beside a batch of a thousand lines,
and the batch alone; the embedded model, one mesh with its defaults.

{figures(_LINES, now, earlier)}

Measured on {now.machine}.{other}
"""
