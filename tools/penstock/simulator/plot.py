"""A picture of a simulation: how TTFT and ITL are distributed, and TTFT over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.simulator.simulation import Served, SimulationResult

_WINDOWS = 60
"""Parts of the time, of which each has its percentiles."""
_PARTS = {"p50": 0.5, "p99": 0.99}


class PlotError(ValueError):
    """A picture that can't be made; the text says why."""


def plot(result: SimulationResult, title: str, target: Path) -> None:
    """Writes a picture; the ending of `target` says of which kind, such as .png or .svg. Raises PlotError."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PlotError("it needs matplotlib: pip install 'penstock[plot]'") from None
    served = [one for one in result.requests if not one.refused]
    picture = Figure(figsize=(13, 4), layout="constrained")
    picture.suptitle(title)
    first, second, third = picture.subplots(1, 3)
    for axes, values, name in (
        (first, sorted(one.ttft_s for one in served), "TTFT, s"),
        (second, sorted(one.itl_s for one in served), "mean ITL of an answer, s"),
    ):
        axes.plot(values, [(number + 1) / len(values) for number in range(len(values))])
        axes.set(xlabel=name, ylabel="part of the requests", xscale="symlog" if name.startswith("TTFT") else "linear")
        axes.grid(alpha=0.3)
    for name, part in _PARTS.items():
        third.plot(*_over_time(served, part), label=name)
    third.set(xlabel="time, s", ylabel="TTFT, s", yscale="symlog")
    third.legend()
    third.grid(alpha=0.3)
    try:
        picture.savefig(target)
    except (ValueError, OSError) as error:
        raise PlotError(str(error)) from error


def _over_time(served: Sequence[Served], part: float) -> tuple[list[float], list[float]]:
    """A percentile of the TTFT in each window in which requests came."""
    length = max(1e-9, served[-1].at if served else 0.0) / _WINDOWS
    windows: dict[int, list[float]] = {}
    for one in served:
        windows.setdefault(min(_WINDOWS - 1, int(one.at / length)), []).append(one.ttft_s)
    times = [(number + 0.5) * length for number in sorted(windows)]
    values = [sorted(windows[number]) for number in sorted(windows)]
    return times, [one[min(len(one) - 1, int(part * len(one)))] for one in values]
