"""What a worker believes of the way to its store."""

from __future__ import annotations

import pytest

from penstock.worker.links import Link, Links

MIB = 1 << 20


def test_a_rate_is_bytes_by_seconds_and_follows_changes() -> None:
    link = Link()
    link.moved(10 * MIB, 0.1)
    assert link.rate == pytest.approx(100 * MIB)
    for _ in range(200):
        link.moved(10 * MIB, 1.0)
    assert link.rate == pytest.approx(10 * MIB, rel=0.02)


def test_small_transfers_say_nothing_of_the_link() -> None:
    link = Link()
    link.moved(4096, 1.0)
    link.moved(10 * MIB, 0.0)
    assert link.rate == 0.0


def test_remote_blocks_are_counted_apart() -> None:
    links = Links()
    links.fetched(["host"] * 4, 4 * MIB, 0.01)
    links.fetched(["host", "remote", "remote", "remote"], 4 * MIB, 0.3)
    links.fetched([], 0, 0.1)
    assert links.near.rate == pytest.approx(400 * MIB)
    assert links.far.rate == pytest.approx(10 * MIB)
