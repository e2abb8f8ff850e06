"""The block index beside the obvious implementation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.services.router.helpers import keys

from penstock.router.index import BlockIndex


class Plain:
    """One set per store."""

    def __init__(self) -> None:
        self.stores: dict[str, set[bytes]] = {}

    def match(self, wanted: list[bytes]) -> dict[str, int]:
        depths = {}
        for store, held in self.stores.items():
            depth = next((number for number, key in enumerate(wanted) if key not in held), len(wanted))
            if depth:
                depths[store] = depth
        return depths


NAMES = st.sampled_from(["a", "b", "c"])
CHOSEN = st.lists(st.sampled_from(keys(12)), max_size=12)
STEPS = st.lists(st.tuples(st.sampled_from(["stored", "removed", "drop", "match"]), NAMES, CHOSEN), max_size=60)


@given(STEPS)
def test_index_finds_what_sets_find(steps: list[tuple[str, str, list[bytes]]]) -> None:
    index, plain = BlockIndex(1000), Plain()
    for what, store, chosen in steps:
        if what == "stored":
            index.stored(store, chosen)
            plain.stores.setdefault(store, set()).update(chosen)
        elif what == "removed":
            index.removed(store, chosen)
            plain.stores.get(store, set()).difference_update(chosen)
        elif what == "drop":
            index.drop(store)
            plain.stores.pop(store, None)
        assert index.match(keys(12)) == plain.match(keys(12))
        assert index.match(chosen) == plain.match(chosen)


def test_memory_is_bounded_and_used_prefixes_stay() -> None:
    index = BlockIndex(100)
    index.stored("a", keys(20))
    for chain in range(1, 60):
        index.stored("a", keys(10, chain))
        assert index.match(keys(20)) == {"a": 20}
        assert len(index) <= 100
    stats = index.stats()
    assert (stats.blocks, stats.holders) == (100, 1)
    assert stats.forgotten == 20 + 59 * 10 - 100


def test_a_store_that_left_is_tidied_away() -> None:
    index = BlockIndex(10_000)
    index.stored("a", keys(5000))
    index.stored("b", keys(10))
    index.drop("a")
    assert index.match(keys(20)) == {"b": 10}
    for _ in range(20):
        index.stored("b", [])
    assert len(index) == 10
    index.stored("c", keys(3))
    assert index.match(keys(20)) == {"b": 10, "c": 3}
