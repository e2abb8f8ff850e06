"""The chains of prompts, beside a model that keeps them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.kv.identity import MAX_KEYS
from penstock.router.chains import Chains, Keys

from .helpers import keys


def whole(found: Keys | None) -> list[bytes]:
    assert found is not None
    return list(found)


def test_the_latest_chain_of_a_conversation_and_the_one_before_are_kept():
    chains = Chains(1000)
    for turn in range(1, 6):
        after = keys(10 * (turn - 1))[-1] if turn > 1 else b""
        assert whole(chains.extend("t", after, keys(10 * turn)[10 * (turn - 1) :])) == keys(10 * turn)
    assert whole(chains.extend("t", keys(50)[-1], [])) == keys(50)
    assert whole(chains.extend("t", keys(40)[-1], keys(1, chain=7))) == keys(40) + keys(1, chain=7), "a fork"
    assert chains.extend("t", keys(20)[-1], []) is None
    assert len(chains) == 50 + 41, "the first 40 of a list are no list of their own"


def test_one_tenant_takes_no_room_from_another():
    chains = Chains(100)
    chains.extend("small", b"", keys(30))
    for number in range(1, 9):
        chains.extend("large", b"", keys(25, chain=number))
    assert whole(chains.extend("small", keys(30)[-1], [])) == keys(30)
    assert len(chains) == 30 + 50
    assert chains.extend("large", keys(25, chain=8)[-1], []) is not None
    assert chains.extend("large", keys(25, chain=1)[-1], []) is None


def test_a_tenant_that_is_alone_has_all_the_room():
    """Nine conversations of 100 keys, in turn."""
    chains = Chains(1000)
    for chain in range(9):
        chains.extend("t", b"", keys(90, chain))
    for chain in range(9):
        assert whole(chains.extend("t", keys(90, chain)[-1], keys(100, chain)[90:])) == keys(100, chain)
    assert len(chains) == 900
    chains.extend("other", b"", keys(150))
    assert len(chains) == 1050 - 100, "the one longest unused, both turns of it"
    assert chains.extend("t", keys(100, 0)[-1], []) is None
    assert chains.extend("t", keys(100, 1)[-1], []) is not None


def test_a_chain_has_a_bound():
    chains = Chains(1 << 20)
    chains.extend("t", b"", keys(MAX_KEYS))
    with pytest.raises(InvalidRequest, match=r"ask\.block_keys"):
        chains.extend("t", keys(MAX_KEYS)[-1], keys(1, chain=1))


ASKS = st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 4), st.integers(0, 8))


def held(chains: Chains) -> int:
    """Keys of all lists that are held, counted one by one."""
    lists = {id(one.keys.shared): one.keys.shared for some in chains._tenants.values() for one in some.values()}
    return sum(map(len, lists.values()))


@given(st.lists(ASKS, max_size=60))
def test_what_is_known_is_never_wrong(asks):
    chains = Chains(64)
    for tenant, chain, before, count in asks:
        line = keys(4 * before + count, chain)
        after = line[4 * before - 1] if before else b""
        found = chains.extend(tenant, after, line[4 * before :])
        assert (found is None and after) or list(found) == line
        assert len(chains) == held(chains) <= 64


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=30))
def test_chains_that_share_a_list_do_not_change_each_other(forks):
    """Each one goes on from any of those before it."""
    made: list[tuple[Keys, list[bytes]]] = [(Keys([]), [])]
    for number, (origin, count) in enumerate(forks):
        before, line = made[origin % len(made)]
        more = keys(count, chain=number)
        made.append((before.and_then(more), line + more))
        for got, expected in made:
            assert (list(got), len(got), got[2:], got[-1:]) == (expected, len(expected), expected[2:], expected[-1:])
            assert list(got.first(3)) == expected[:3]
