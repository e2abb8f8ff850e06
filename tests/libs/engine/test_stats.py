"""The engine's figures, which others read while its steps go on."""

from __future__ import annotations

import time

import pytest

from penstock.engine.stats import Counters


def test_a_step_that_ends_while_somebody_looks_has_taken_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reports it would be refused by the router, and so lose its place there."""
    counters, now = Counters(), time.monotonic
    counters.begin()

    def clock() -> float:
        """The next step has begun when the time is read."""
        seen = now()
        counters.step_began = seen + 1.0
        return seen

    with monkeypatch.context() as patch:
        patch.setattr("penstock.engine.stats.time.monotonic", clock)
        assert counters.in_step_s >= 0
    counters.step_began = None
    assert counters.in_step_s == 0
