"""What a block costs to compute again."""

from __future__ import annotations

import pytest

from penstock.kv.cost import PrefillCost

COST = PrefillCost.of_model(hidden_size=64, tokens_per_s=160.0)


def test_the_first_block_costs_what_the_rate_says_and_later_ones_more() -> None:
    assert COST.seconds(0, 16) == pytest.approx(0.1, rel=0.03)
    assert COST.seconds(6 * 64, 16) == pytest.approx(0.2, rel=0.03), "at 6 h attention costs as much as the rest"
    assert COST.seconds(12 * 64, 16) == pytest.approx(0.3, rel=0.03)
