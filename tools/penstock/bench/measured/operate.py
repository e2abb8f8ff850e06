"""The section about what operators ask of a mesh: `penstock bench operate`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("load_schedule_delay_p99_ms", "p99 of how late `penstock load` sends on the mesh's own machine, ms"),
    Line("load_schedule_delay_vs_latency", "the same : the median latency", 4),
    Line("console_axe_violations", "places in the console that axe complains of, in Chromium", 0),
    Line("image_mb_light", "image of gateway, router and store, MB before compression", 0),
    Line("image_mb_worker", "image of workers, with torch, MB before compression", 0),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown; of the figures that the run has."""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## Operating

`penstock bench operate`: agents' sessions that begin at random, once a second in the mean, from one process of
`penstock load` to the mesh of the embedded model on the same machine; the console in a real Chromium, all views in
light and dark, wide and narrow; the images of `deploy/Dockerfile`. Batches and the planner have sections of their own.

{figures([line for line in _LINES if now.has(line.id)], now, earlier)}

Measured on {now.machine}.{other}
"""
