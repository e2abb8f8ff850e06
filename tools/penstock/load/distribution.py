"""How values are distributed, as AIPerf's readers know it. What failed has infinite values, and JSON has no infinity:
whatever is infinite or can't be told because of them is null."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Block = dict[str, Any]
"""`unit`, and what is known of a metric: `avg` alone of a scalar."""
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def scalar(value: float, unit: str) -> Block:
    """A metric that is one number."""
    return {"unit": unit, "avg": _finite(value)}


def spread(values: Iterable[float], unit: str) -> Block | None:
    """A metric that each request has; None without any. Percentiles lie between neighbours by interpolation."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    whole = bool(np.isfinite(array).all())
    return {
        "unit": unit,
        "avg": _finite(array.mean()),
        "min": _finite(array.min()),
        "max": _finite(array.max()),
        **{f"p{at}": _finite(value) for at, value in zip(PERCENTILES, percentiles(array, PERCENTILES), strict=True)},
        "std": _finite(array.std(ddof=1)) if whole and array.size > 1 else (0.0 if whole else None),
        "count": int(array.size),
        "sum": _finite(array.sum()),
    }


def percentiles(values: NDArray[np.float64], at: Iterable[float]) -> NDArray[np.float64]:
    """Percentiles of values of which some may be infinite: infinite where an infinite one takes part."""
    places = [*at]
    lower, higher = (np.percentile(values, places, method=way) for way in ("lower", "higher"))
    with np.errstate(invalid="ignore"):
        between = np.percentile(values, places)
    # Beside an infinite value, numpy's interpolation is no number, also where a percentile is a value itself.
    return np.where(np.isinf(higher), higher, np.where(lower == higher, lower, between))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
