"""How much work comes, and how much will come: a mean that begins anew when the load has changed, and what came one
period ago, where the load has one. Pure: a history in, a number out.

A look is one sample. Requests come by chance, so the last few looks always differ from those before; the mean is of all
since the last change, and a change is what chance does not explain: more than `_SURE` standard deviations of what so
many requests, of sizes that differ as `_SPREAD` says, sum up to. So a steady load has a steady mean, however it
flickers, and a load that jumps is followed within some looks.

A period is looked for in the autocorrelation of the history. Where there is one, what came at the same time of it is
expected again (the seasonal-naive forecast of Hyndman and Athanasopoulos, "Forecasting: Principles and Practice",
section 5.2), in the mean of the periods that were seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_LATEST = (2, 4, 8)
"""Looks that are compared with those before them: a great change shows soon, a small one later."""
_SMOOTH = 6
"""Looks that are averaged of earlier periods."""
_SURE = 4.0
_SPREAD = 2.0
"""Variance of the work of a request, in squares of its mean."""
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
    work, requests = history.work[-history.steady :], history.requests[-history.steady :]
    off = abs(sum(work[before:]) / latest - sum(work[:before]) / before)
    each, size = sum(requests) / len(requests), sum(work) / max(1e-9, sum(requests))
    deviation: float = size * (each * (1 + _SPREAD) * (1 / latest + 1 / before)) ** 0.5
    return off > _SURE * deviation


def peak(history: LoadHistory, looks: int) -> float:
    """The most that is expected within the next `looks`: the level, or what came at that time of earlier periods."""
    now, period = level(history), period_of(history)
    return max(now, _seasonal(history, period, looks)) if period else now


def period_of(history: LoadHistory) -> int:
    """In looks; 0: none that begins again."""
    if len(history.work) < 4 * _SHORTEST:
        return 0
    each = -(-len(history.work) // _BINS)
    whole = np.asarray(history.work[len(history.work) % each :])
    found = _period(whole.reshape(-1, each).mean(axis=1))
    return found * each


def _period(work: _Floats) -> int:
    """The distance at which the work is most like itself."""
    centred = work - work.mean()
    size, variance = len(centred), float(centred @ centred)
    if variance <= 1e-12 * size * max(1.0, float(work.mean()) ** 2):
        return 0
    spectrum = np.fft.rfft(centred, 2 * size)
    most = int(size * _SEEN) + 1
    like = np.fft.irfft(spectrum * spectrum.conj())[:most] / variance
    like = like * size / (size - np.arange(most))  # longer distances have fewer pairs
    begins = next((at for at in range(1, len(like)) if like[at] < 0), len(like))  # behind what is like it as it is near
    begins = max(begins, _SHORTEST)
    if begins >= len(like):
        return 0
    best = begins + int(like[begins:].argmax())
    return best if like[best] > _ALIKE else 0


def _seasonal(history: LoadHistory, period: int, looks: int) -> float:
    """The most within the next `looks`, by the mean of the last periods, each point of it smoothed."""
    work = np.asarray(history.work)
    periods = max(1, min(_PERIODS, len(work) // period))
    ahead = np.arange(-(_SMOOTH // 2), min(looks, period) + _SMOOTH // 2)
    at = len(work) - period * np.arange(1, periods + 1)[:, None] + ahead[None, :]
    expected = np.where(at >= 0, work[np.clip(at, 0, len(work) - 1)], 0.0).mean(axis=0)
    smooth = np.convolve(expected, np.ones(_SMOOTH) / _SMOOTH, mode="valid") if len(expected) >= _SMOOTH else expected
    return float(smooth.max())
