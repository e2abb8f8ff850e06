"""The block index beside the obvious implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from hypothesis import given
from hypothesis import strategies as st
from tests.services.router.helpers import keys

from penstock.router.chains import Keys
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
CHAINS = st.tuples(st.integers(0, 2), st.integers(0, 40))
"""A chain, and how many of its leading keys."""
STEPS = st.lists(st.tuples(st.sampled_from(["stored", "removed", "drop", "match"]), NAMES, CHAINS), max_size=60)


@given(STEPS)
def test_index_finds_what_sets_find(steps: list[tuple[str, str, tuple[int, int]]]) -> None:
    """Members store chains from the front and give them up from the end."""
    index, plain = BlockIndex(1000), Plain()
    for what, store, (chain, count) in steps:
        if what == "stored":
            index.stored(store, keys(count, chain))
            plain.stores.setdefault(store, set()).update(keys(count, chain))
        elif what == "removed":
            index.removed(store, keys(40, chain)[count:])
            plain.stores.get(store, set()).difference_update(keys(40, chain)[count:])
        elif what == "drop":
            index.drop(store)
            plain.stores.pop(store, None)
        for number in range(3):
            wanted = [*keys(count, number), *keys(5, 9)]
            assert index.match(wanted) == plain.match(wanted)


@given(st.lists(st.sampled_from(range(30)), max_size=30))
def test_a_lost_block_in_the_middle_is_overlooked_at_most(lost: list[int]) -> None:
    index, plain = BlockIndex(1000), Plain()
    plain.stores["a"] = set(keys(30))
    index.stored("a", keys(30))
    index.removed("a", [keys(30)[at] for at in lost])
    plain.stores["a"].difference_update(keys(30)[at] for at in lost)
    depth, exact = index.match(keys(30)).get("a", 0), plain.match(keys(30)).get("a", 0)
    assert depth >= exact and (depth > 0) == (exact > 0)
    assert depth == 30 or keys(30)[depth] not in plain.stores["a"]
    assert depth == 0 or keys(30)[depth - 1] in plain.stores["a"]


class Counting(Sequence[bytes]):
    """Keys, and how many of them were read."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self.read = 0

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        self.read += 1
        return self._keys[at]


def test_a_look_at_a_long_prompt_reads_few_of_its_keys() -> None:
    index = BlockIndex(100_000)
    for holder, count in (("a", 6000), ("b", 100), ("c", 4000)):
        index.stored(holder, keys(count))
    prompt = Counting(keys(6250))
    assert index.match(prompt) == {"a": 6000, "b": 100, "c": 4000}
    assert prompt.read < 100


def test_memory_is_bounded_and_used_prefixes_stay() -> None:
    index = BlockIndex(100)
    index.stored("a", keys(20))
    for chain in range(1, 60):
        index.stored("a", keys(4, chain))
        assert index.match(keys(20)) == {"a": 20}
        index.used(keys(20))
        assert len(index) <= 100
    stats = index.stats()
    assert (stats.blocks, stats.holders) == (100, 1)
    assert stats.forgotten == 20 + 59 * 4 - 100


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


def test_a_store_that_left_is_tidied_away_while_others_take_blocks_away() -> None:
    index = BlockIndex(10_000)
    index.stored("a", keys(600))
    index.stored("b", keys(2000, 1))
    index.drop("a")
    index.removed("b", keys(2000, 1))
    index.stored("b", keys(3, 2))
    assert index.match(keys(3, 2)) == {"b": 3} and len(index) <= 603
    for _ in range(5):
        index.stored("b", [])
    assert len(index) == 3


def test_a_bit_is_not_used_again_while_blocks_have_it() -> None:
    """The use of a prompt changes the order in which entries are tidied."""
    index = BlockIndex(6000)
    index.stored("a", keys(5000))
    index.stored("b", keys(5000))
    index.drop("a")
    for _ in range(20):
        index.used(keys(5000))
        index.stored("b", [])
    index.stored("c", keys(1, 7))
    assert index.match(keys(5000)) == {"b": 5000}


@given(
    held=st.lists(st.integers(0, 300), min_size=1, max_size=5), count=st.integers(1, 300), earlier=st.integers(0, 400)
)
def test_where_the_last_prompt_ended_is_no_more_than_a_hint(held: list[int], count: int, earlier: int) -> None:
    index = BlockIndex(1000)
    for number, depth in enumerate(held):
        index.stored(f"s{number}", keys(depth))
    assert index.match(Keys(keys(300), count, earlier)) == index.match(keys(count))


def test_a_look_at_a_turn_reads_few_keys_of_what_was_there_before() -> None:
    """But for those of the common beginning, and of what is new."""
    index = BlockIndex(100_000)
    index.stored("a", keys(6000))
    index.stored("b", keys(60))
    all_keys = Counting(keys(6045))
    assert index.match(Keys(all_keys, earlier=6000)) == {"a": 6000, "b": 60}  # type: ignore[arg-type]
    assert all_keys.read < 20
