"""Keys that are remembered are those that hashing gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.identity import block_keys
from penstock.kv.recent import RecentKeys

ROOT = bytes(32)


def test_a_sequence_that_goes_on_is_hashed_from_there_on():
    recent = RecentKeys(4)
    tokens = list(range(400))
    for end in (100, 250, 400):
        assert recent.of(ROOT, tokens[:end]) == block_keys(ROOT, tokens[:end], 4)
        assert recent.hashed == end // 4
    recent.of(ROOT, tokens)
    assert recent.hashed == 100


def test_what_it_gives_is_the_callers_own():
    recent = RecentKeys(4)
    recent.of(ROOT, range(8)).clear()
    assert recent.of(ROOT, range(8)) == block_keys(ROOT, range(8), 4)


def test_the_oldest_goes_when_there_is_no_room():
    recent = RecentKeys(4, most_tokens=80)
    for first in (1000, 2000, 3000):
        recent.of(ROOT, range(first, first + 40))
    assert recent.hashed == 30
    recent.of(ROOT, range(3000, 3040))
    recent.of(ROOT, range(1000, 1040))
    assert recent.hashed == 40


SEQUENCES = st.lists(
    st.tuples(st.sampled_from([ROOT, b"r" * 32]), st.lists(st.integers(0, 1), max_size=30)), min_size=1, max_size=20
)


@given(SEQUENCES, st.integers(1, 4), st.sampled_from([8, 40, 1000]))
def test_it_gives_what_hashing_gives(sequences, block_size, most_tokens):
    recent = RecentKeys(block_size, most_tokens=most_tokens)
    for root, tokens in sequences:
        assert recent.of(root, tokens) == block_keys(root, tokens, block_size)
