"""What a block costs to compute again."""

from __future__ import annotations

import pytest

from penstock.worker.cost import PrefillCost

COST = PrefillCost(block_size=16, hidden_size=64)


def test_unknown_until_a_rate_is_measured() -> None:
    assert COST.seconds(0, 0.0) == 0.0


def test_the_first_block_costs_what_the_rate_says_and_later_ones_more() -> None:
    assert COST.seconds(0, 160.0) == pytest.approx(0.1, rel=0.03)
    assert COST.seconds(6 * 64, 160.0) == pytest.approx(0.2, rel=0.03), "at 6 h attention costs as much as the rest"
    assert COST.seconds(12 * 64, 160.0) == pytest.approx(0.3, rel=0.03)
