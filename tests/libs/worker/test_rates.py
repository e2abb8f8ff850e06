"""What a worker believes of the way to its store."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.rates import FetchRates, TransferCost

MIB = 1 << 20


def test_bytes_by_seconds_as_long_as_all_transfers_are_alike() -> None:
    way = TransferCost()
    way.moved(10 * MIB, 0.1)
    assert way.bytes_per_s == pytest.approx(100 * MIB) and way.overhead_s == 0.0
    for _ in range(400):
        way.moved(10 * MIB, 1.0)
    assert way.bytes_per_s == pytest.approx(10 * MIB, rel=0.02)


@pytest.mark.parametrize(("overhead_s", "rate"), [(0.0005, 5e9), (0.002, 1e9), (0.01, 2e8)])
def test_what_every_transfer_costs_is_told_from_its_bytes(overhead_s: float, rate: float) -> None:
    """With noise of a fifth."""
    way, draw = TransferCost(), Random(1)
    for _ in range(300):
        size = draw.choice([1, 2, 10, 64, 500]) << 16
        way.moved(size, (overhead_s + size / rate) * draw.lognormvariate(0, 0.2))
    assert way.overhead_s == pytest.approx(overhead_s, rel=0.2)
    assert way.bytes_per_s == pytest.approx(rate, rel=0.2)


def test_old_transfers_fade() -> None:
    way = TransferCost()
    for overhead_s, rate in ((0.01, 1e8), (0.001, 1e9)):
        for number in range(400):
            size = (1 + number % 7) * MIB
            way.moved(size, overhead_s + size / rate)
    assert way.overhead_s == pytest.approx(0.001, rel=0.05)
    assert way.bytes_per_s == pytest.approx(1e9, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 1 << 34), st.floats(0, 1e3)), min_size=1))
def test_whatever_moves_the_figures_make_sense(transfers: list[tuple[int, float]]) -> None:
    way = TransferCost()
    for size, seconds in transfers:
        way.moved(size, seconds)
    longest = max((seconds for size, seconds in transfers if size), default=0.0)
    assert 0 <= way.overhead_s <= longest * (1 + 1e-9)  # sums are rounded
    assert 0 <= way.bytes_per_s < float("inf")
    assert (way.bytes_per_s > 0) == any(size and seconds >= 1e-7 for size, seconds in transfers)


def test_remote_blocks_are_counted_apart() -> None:
    rates = FetchRates()
    rates.fetched(["host"] * 4, 4 * MIB, 0.01)
    rates.fetched(["host", "remote", "remote", "remote"], 4 * MIB, 0.3)
    rates.fetched([], 0, 0.1)
    assert rates.near.bytes_per_s == pytest.approx(400 * MIB)
    assert rates.far.bytes_per_s == pytest.approx(10 * MIB)
