"""What a worker believes of the way to its store."""

from __future__ import annotations

import pytest

from penstock.worker.rates import FetchRates, TransferRate

MIB = 1 << 20


def test_a_rate_is_bytes_by_seconds_and_follows_changes() -> None:
    rate = TransferRate()
    rate.moved(10 * MIB, 0.1)
    assert rate.bytes_per_s == pytest.approx(100 * MIB)
    for _ in range(200):
        rate.moved(10 * MIB, 1.0)
    assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.02)


def test_small_transfers_say_nothing_of_the_way() -> None:
    rate = TransferRate()
    rate.moved(4096, 1.0)
    rate.moved(10 * MIB, 0.0)
    assert rate.bytes_per_s == 0.0


def test_remote_blocks_are_counted_apart() -> None:
    rates = FetchRates()
    rates.fetched(["host"] * 4, 4 * MIB, 0.01)
    rates.fetched(["host", "remote", "remote", "remote"], 4 * MIB, 0.3)
    rates.fetched([], 0, 0.1)
    assert rates.near.bytes_per_s == pytest.approx(400 * MIB)
    assert rates.far.bytes_per_s == pytest.approx(10 * MIB)
