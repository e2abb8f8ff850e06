"""Prompt lookup against the obvious loop."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.hooks import DraftAsk
from penstock.engine.speculation.drafting import NgramProposer


def ask_of(tokens, k):
    return DraftAsk("a", tokens, k, 0, 0.0, 0, 1.0, 0.0)


def naive(tokens, k, longest, shortest):
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                grown = list(tokens)
                for at in range(k):
                    grown.append(grown[start + length + at])
                return grown[len(tokens) :]
    return []


@given(
    st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16777216]), max_size=60),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_equals_the_obvious_loop(tokens, k, shortest, more):
    proposer = NgramProposer(shortest + more, shortest)
    assert proposer.propose([ask_of(tokens, k)]) == [naive(tokens, k, shortest + more, shortest)]


def test_continues_cycles_and_looks_back_only_so_far():
    assert NgramProposer().propose([ask_of([9, 1, 2, 3, 1, 2, 3, 1, 2], 5)]) == [[3, 1, 2, 3, 1]]
    far = [7, 8, 9, *range(100, 200), 7, 8]
    assert NgramProposer().propose([ask_of(far, 1)]) == [[9]]
    assert NgramProposer(window=50).propose([ask_of(far, 1)]) == [[]]
    with pytest.raises(ValueError, match="shortest"):
        NgramProposer(1, 2)


def test_worst_case_is_linear():
    """Text whose bytes match everywhere but never on a token's boundary."""
    tokens = [0x01010101 * (at % 2) + 0x01010100 for at in range(200_000)] + [0x01010101] * 3
    started = time.process_time()
    NgramProposer(window=10**6).propose([ask_of(tokens, 4)])
    assert time.process_time() - started < 2
