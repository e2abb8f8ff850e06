"""Requests beside what their clients wanted of them."""

from __future__ import annotations

from math import inf

import pytest

from penstock.gateway.completing.counting import judged
from penstock.gateway.request.ask import Urgency

TIMES = {"first_token": 1.0, "handoff": 0.5, "decode": 1.5}


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "tokens", "outcome"),
    [
        (inf, inf, 11, None),
        (2.0, inf, 11, "met"),
        (0.5, inf, 11, "late"),
        (0.5, 0.1, 11, "late"),
        (2.0, 0.1, 11, "slow"),
        (inf, 0.2, 11, "met"),
        (inf, 0.2, 10, "slow"),
        (2.0, inf, 1, "met"),
        (0.5, 0.1, 0, None),
    ],
)
def test_targets(ttft_s: float, itl_s: float, tokens: int, outcome: str | None) -> None:
    """Two seconds for ten tokens after the first; who has a bound for one of both has none for the other."""
    assert judged(Urgency(ttft_s=ttft_s, itl_s=itl_s), TIMES, tokens) == outcome
