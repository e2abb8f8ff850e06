"""Whose chains are computed with adapters."""

from __future__ import annotations

from penstock.worker.adapted_roots import AdaptedRoots


def test_the_roots_of_a_namespace_and_of_no_other():
    roots = AdaptedRoots(most=3)
    for root, namespace in ((b"1", b"a"), (b"2", b"b"), (b"3", b"a"), (b"1", b"a")):
        roots.used(root, namespace)
    assert (roots.of(b"a"), roots.of(b"b"), roots.of(b"c")) == ({b"1", b"3"}, {b"2"}, frozenset())
    roots.used(b"4", b"b")
    assert (roots.of(b"a"), roots.of(b"b")) == ({b"1", b"3"}, {b"4"}), "that which was used before all others is gone"
