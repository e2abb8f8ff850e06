"""Dividing layers into consecutive stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def stages(costs: Sequence[int], count: int) -> list[range]:
    """`costs`, of each layer, in `count` runs of one or more, so that the dearest run is as cheap as possible."""
    assert 1 <= count <= len(costs)
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_ends(costs, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    ends = _ends(costs, low)
    while len(ends) < count:  # some stages are left over: the longest give them a part
        bounds = [0, *ends]
        first, last = max(pairwise(bounds), key=lambda pair: pair[1] - pair[0])
        ends = sorted([*ends, (first + last) // 2])
    return [range(first, last) for first, last in pairwise([0, *ends])]


def _ends(costs: Sequence[int], most: int) -> list[int]:
    """Where runs end that cost at most `most` each and are as long as possible."""
    ends, spent = [], 0
    for layer, cost in enumerate(costs):
        if spent + cost > most and spent:
            ends.append(layer)
            spent = 0
        spent += cost
    return [*ends, len(costs)]
