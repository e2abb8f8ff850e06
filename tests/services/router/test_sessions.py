"""What is remembered of sessions is bounded, and expires."""

from __future__ import annotations

from penstock.router.sessions import Recent


def test_entries_expire_and_are_bounded() -> None:
    recent: Recent[str, int] = Recent(2, ttl=10)
    recent.set("a", 1, now=0)
    recent.set("b", 2, now=5)
    assert (recent.get("a", 10), recent.get("a", 10.1)) == (1, None)
    recent.set("a", 3, now=11)
    recent.set("c", 4, now=11)
    assert len(recent) == 2
    assert (recent.get("a", 11), recent.get("b", 11), recent.get("c", 11)) == (3, None, 4)
