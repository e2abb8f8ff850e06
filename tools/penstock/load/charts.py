"""Plots as shapes in a box: what is drawn where. The page's template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 32, 44
"""Room around the plot, for names of curves, ticks and names of axes."""
_TICKS = 6
_MANY = 1000
"""A logarithmic axis that is so long has a tick for each power of ten alone."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    name: str
    points: Points


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark at an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places. Logarithmic ones have none for values that aren't above 0."""

    name: str
    low: float
    high: float
    first: float
    last: float
    """The places of low and high."""
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value is."""
        low, high, at = (map(math.log10, (self.low, self.high, value))) if self.log else (self.low, self.high, value)
        part = (at - low) / ((high - low) or 1.0)
        return round(self.first + min(1.0, max(0.0, part)) * (self.last - self.first), 1)

    @property
    def ticks(self) -> list[Tick]:
        """Round values between low and high."""
        return [Tick(self.place(value), f"{value:g}") for value in (self._decades() if self.log else self._steps())]

    def _decades(self) -> list[float]:
        few = self.high / self.low < _MANY
        return [value for value in _round_ones(self.low, self.high) if few or f"{value:e}"[0] == "1"]

    def _steps(self) -> list[float]:
        step = _step((self.high - self.low) or 1.0)
        first = math.ceil(self.low / step)
        count = math.floor(self.high / step) - first
        return [round((first + number) * step, 12) for number in range(count + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plot, and the same in numbers for those who don't see it."""

    id: str
    title: str
    about: str
    """One sentence: what it shows."""
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    paths: Sequence[str] = field(default=())
    """Of the curves, in SVG."""


def chart(
    id: str,
    title: str,
    about: str,
    curves: Sequence[Curve],
    *,
    axes: tuple[str, str],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    log_x: bool = False,
    top: float | None = None,
) -> Chart | None:
    """A plot of curves; None when none of them has a point. `top`: where the vertical axis ends."""
    kept = [Curve(curve.name, _drawable(curve.points, log_x)) for curve in curves]
    kept = [curve for curve in kept if curve.points]
    if not kept:
        return None
    xs = [at for curve in kept for at, _ in curve.points]
    ys = [value for curve in kept for _, value in curve.points]
    low, high = min(xs), max(xs)
    if log_x:
        around = _round_ones(low / 5, high * 5)
        low, high = max(one for one in around if one <= low), min(one for one in around if one > high)
    x = Axis(axes[0], low, high if high > low else low + 1, LEFT, WIDTH - RIGHT, log_x)
    y = Axis(axes[1], 0.0, top or (_above(max(ys)) if max(ys) else 1.0), HEIGHT - BOTTOM, TOP)
    paths = [" ".join(f"{x.place(at)},{y.place(value)}" for at, value in curve.points) for curve in kept]
    return Chart(id=id, title=title, about=about, x=x, y=y, curves=kept, header=table[0], rows=table[1], paths=paths)


def _step(span: float) -> float:
    """Between ticks of a span: a round one, so that there are not too many."""
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)


def _above(value: float) -> float:
    """The tick at a value or above it, of an axis from 0 on."""
    step = _step(value)
    return math.ceil(value / step) * step


def _round_ones(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = (float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5))
    return [value for value in found if low <= value <= high]


def _drawable(points: Points, log_x: bool) -> Points:
    return [(at, value) for at, value in points if math.isfinite(at) and math.isfinite(value) and (at > 0 or not log_x)]


def cumulated(values: Iterable[float], most: int = 200) -> Points:
    """Of each value, the part of all that is not larger; at most so many points. Infinite values are a part of all."""
    ordered = sorted(values)
    count = len(ordered)
    picked = range(count) if count <= most else sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})
    return [(ordered[at], (at + 1) / count) for at in picked]


def windowed(points: Points, value: Callable[[Sequence[float]], float], windows: int = 60) -> list[tuple[float, float]]:
    """One value of the points in each of so many windows of time, at its middle; windows without points have none."""
    if not points:
        return []
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    length = ((last - first) or 1.0) / windows
    found: dict[int, list[float]] = {}
    for at, one in points:
        found.setdefault(min(windows - 1, int((at - first) / length)), []).append(one)
    return [(first + (number + 0.5) * length, value(found[number])) for number in sorted(found)]
