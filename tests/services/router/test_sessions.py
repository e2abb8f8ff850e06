"""What is remembered of sessions is bounded, and expires."""

from __future__ import annotations

from penstock.router.sessions import OutputLengths, Recent


def test_entries_expire_and_are_bounded() -> None:
    recent: Recent[str, int] = Recent(2, ttl=10)
    recent.set("a", 1, now=0)
    recent.set("b", 2, now=5)
    assert (recent.get("a", 10), recent.get("a", 10.1)) == (1, None)
    recent.set("a", 3, now=11)
    recent.set("c", 4, now=11)
    assert len(recent) == 2
    assert (recent.get("a", 11), recent.get("b", 11), recent.get("c", 11)) == (3, None, 4)


def test_output_is_expected_from_session_then_tenant_then_model() -> None:
    lengths = OutputLengths(100, ttl=1000)
    assert lengths.expect("m", "t", "s", limit=10_000, now=0) == 256
    lengths.learn("m", "other", "", 40, now=0)
    assert lengths.expect("m", "t", "s", limit=10_000, now=0) == 40
    lengths.learn("m", "t", "s", 100, now=0)
    lengths.learn("m", "t", "another", 500, now=0)
    assert lengths.expect("m", "t", "s", limit=10_000, now=0) == 100
    assert 100 < lengths.expect("m", "t", "new", limit=10_000, now=0) < 500
    assert lengths.expect("m", "t", "s", limit=10, now=0) == 10
