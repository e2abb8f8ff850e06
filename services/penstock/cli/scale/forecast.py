"""How much work comes, and how much will come: a mean that begins anew when the load has changed, and what came one
period ago, where the load has one. Pure: a history in, a number out.

A look is one sample. Requests come by chance, so the last few looks always differ from those before; the mean is of all
since the last change, and a change is what chance does not explain: more than `_SURE` standard deviations of what so
many requests, of sizes that differ as `_SPREAD` says, sum up to. So a steady load has a steady mean, however it
flickers, and a load that jumps or falls is followed within some looks.

A period is looked for in the autocorrelation of the history, and how long it is in that at all its multiples. Where
there is one, what came at the same time of it is expected again (the seasonal-naive forecast of Hyndman and
Athanasopoulos, "Forecasting: Principles and Practice", section 5.2), in the mean of the periods that were seen: if that
is more than now by more than chance explains, and else as a part of the mean of now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
import numpy.typing as npt

_LATEST = (2, 4, 8)
"""Looks that are compared with those before them: a great change shows soon, a small one later."""
_SMOOTH = 6
"""Looks that are averaged of earlier periods."""
_SURE = 4.0
_SPREAD = 2.0
"""Variance of the work of a request, in squares of its mean."""
_GREATEST = 2.0
"""Standard deviations by which the greatest of some looks is greater than their mean by chance."""
_LONGEST = 60
"""Looks of the mean at most."""
_KEPT = 4096
"""Looks that are remembered."""
_BINS = 512
"""The history is looked at so coarsely at most, for its period."""
_SHORTEST = 8
"""Bins of a period."""
_ALIKE = 0.6
"""So much of one period has to be like the one before: the autocorrelation at that distance."""
_NEARLY = 0.9
"""Of how much the work is like itself at the best distance: as much at a shorter one makes that the period."""
_SEEN = 0.5
"""A period is so much of the history at most: all of it was seen twice."""
_PERIODS = 3
"""The last ones are averaged."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """Work that came, by look, in any unit per second."""

    work: tuple[float, ...] = ()
    requests: tuple[float, ...] = ()
    """With which it came, in each look."""
    steady: int = 0
    """So many of the last looks are alike."""


def seen(history: LoadHistory, work: float, requests: float, looks: int = 1) -> LoadHistory:
    """The history with one more look, which stands for `looks` of them where some were missed."""
    looks = max(1, min(looks, _KEPT))
    history = LoadHistory(
        (*history.work, *[work] * looks)[-_KEPT:],
        (*history.requests, *[requests] * looks)[-_KEPT:],
        min(history.steady + looks, _LONGEST),
    )
    return replace(history, steady=_alike(history))


def level(history: LoadHistory) -> float:
    """Of now: the mean since the last change."""
    latest = history.work[-max(1, history.steady) :]
    return sum(latest) / max(1, len(latest))


def _alike(history: LoadHistory) -> int:
    """Looks until the last change: all that were alike, or so many last ones as differ from those before them by more
    than chance."""
    for latest in _LATEST:
        before = history.steady - latest
        if before >= latest and _differ(history, latest, before):
            return latest
    return history.steady


def _differ(history: LoadHistory, latest: int, before: int) -> bool:
    """Whether one rate for all looks is refuted by its deviance: as of counts by chance, whose variance is as many
    times their mean as a request brings (McCullagh and Nelder, "Generalized Linear Models", section 9.2)."""
    work, requests = history.work[-history.steady :], history.requests[-history.steady :]
    total = sum(work)
    size = total / max(1e-9, sum(requests))
    parts = ((sum(work[before:]), latest), (sum(work[:before]), before))
    each = total / (latest + before)
    deviance = 2 * sum(part * log(part / (each * looks)) for part, looks in parts if part > 0)
    return deviance > _SURE**2 * size * (1 + _SPREAD)


def peak(history: LoadHistory, period: int, looks: int) -> float:
    """The most that is expected within the next `looks`: the level, or what came at that time of earlier periods if
    that was more. Where chance explains the difference both are one, and the mean is of all their looks."""
    now = level(history)
    if not period:
        return now
    expected, periods = _seasonal(history.work, period, looks)
    if expected <= now:
        return now
    requests, _ = _seasonal(history.requests, period, looks)
    steady, earlier = max(1, history.steady), _SMOOTH * periods
    each = (requests + sum(history.requests[-steady:]) / steady) / 2
    deviation = (expected + now) / 2 * ((1 + _SPREAD) * (1 / earlier + 1 / steady) / max(1e-9, each)) ** 0.5
    if expected - now > _GREATEST * deviation:
        return expected
    return (now * steady + expected * earlier) / (steady + earlier)


def seasonal(history: LoadHistory, period: int, looks: int) -> float:
    """The most that came within the next `looks` of earlier periods; 0: there are none."""
    return _seasonal(history.work, period, looks)[0] if period else 0.0


def period_of(history: LoadHistory) -> int:
    """In looks; 0: none that begins again."""
    if len(history.work) < 4 * _SHORTEST:
        return 0
    each = -(-len(history.work) // _BINS)
    whole = np.asarray(history.work[len(history.work) % each :])
    found = _period(np.sqrt(whole.reshape(-1, each).mean(axis=1)))  # what sums up by chance varies as its root does
    return found * each


def _period(work: _Floats) -> int:
    """The shortest distance at whose multiples the work is nearly as much like itself as at any.

    Whether there is one is said by the autocorrelation alone. Where it is, by all multiples together: chance moves each
    of them, and all but the first are as far off as many times what the distance is.
    """
    centred = work - work.mean()
    size, variance = len(centred), float(centred @ centred)
    if variance <= 1e-12 * size * max(1.0, float(work.mean()) ** 2):
        return 0
    spectrum = np.fft.rfft(centred, 2 * size)
    products = np.fft.irfft(spectrum * spectrum.conj())[:size] / variance
    most, pairs = int(size * _SEEN) + 1, size - np.arange(size)
    like = (products * size / pairs)[:most]  # longer distances have fewer pairs
    begins = next((at for at in range(1, len(like)) if like[at] < 0), len(like))  # behind what is like it as it is near
    begins = max(begins, _SHORTEST)
    if begins >= len(like) or like[begins:].max() <= _ALIKE:
        return 0
    near = np.convolve(np.concatenate([products[1:2], products, [0.0]]), np.ones(3) / 3, mode="valid")
    alike = np.array([near[at::at].sum() / pairs[at::at].sum() for at in range(begins, most)])
    edges = np.concatenate([[-np.inf], alike, [-np.inf]])
    tops = (alike >= edges[:-2]) & (alike >= edges[2:]) & (alike >= _NEARLY * alike.max())
    return begins + int(tops.argmax())


def _seasonal(values: Sequence[float], period: int, looks: int) -> tuple[float, int]:
    """The most within the next `looks`, by the mean of the last periods, each point of it smoothed; and how many these
    are. A rise has its whole height half of what is smoothed behind it."""
    work = np.asarray(values)
    periods = max(1, min(_PERIODS, len(work) // period))
    ahead = np.arange(-(_SMOOTH // 2), min(looks + _SMOOTH // 2, period) + _SMOOTH // 2)
    at = len(work) - period * np.arange(1, periods + 1)[:, None] + ahead[None, :]
    expected = np.where(at >= 0, work[np.clip(at, 0, len(work) - 1)], 0.0).mean(axis=0)
    smooth = np.convolve(expected, np.ones(_SMOOTH) / _SMOOTH, mode="valid") if len(expected) >= _SMOOTH else expected
    return float(smooth.max()), periods
