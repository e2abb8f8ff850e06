"""Layers in consecutive stages, beside all ways to divide them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from penstock.sizing.stages import stages


def naive_dearest(costs: list[int], count: int) -> int:
    """The least that the dearest stage can cost."""
    return min(
        max(sum(costs[first:last]) for first, last in zip((0, *cuts), (*cuts, len(costs)), strict=True))
        for cuts in combinations(range(1, len(costs)), count - 1)
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_dearest_stage_is_as_cheap_as_possible(costs: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    found = stages(costs, count)
    assert len(found) == count and all(found)
    assert [layer for own in found for layer in own] == list(range(len(costs)))
    assert max(sum(costs[layer] for layer in own) for own in found) == naive_dearest(costs, count)


def test_embedding_and_last_matrix_count() -> None:
    assert stages([3, 1, 1, 1, 3], 3) == [range(1), range(1, 4), range(4, 5)]
