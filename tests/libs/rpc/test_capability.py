from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.rpc.capability import PLAN_KEY_BYTES, RENEW_S, PlanKeys, PlanTerms

pytestmark = pytest.mark.attack


TERMS = PlanTerms(
    request_id="r1",
    epoch=1,
    namespace=b"n" * 16,
    cache_root=b"c" * 32,
    prefill="10.0.0.1:7000",
    decode="10.0.0.2:7000",
    sources=("10.0.0.3:7000", "10.0.0.4:7000"),
)


def plan(epoch: int) -> PlanTerms:
    """Another plan for the same request."""
    return replace(TERMS, epoch=epoch)


def test_what_the_key_is_of_is_believed_and_nothing_else():
    keys, others = PlanKeys(), PlanKeys()
    with keys.of_stream() as renew, others.of_stream() as renew_other:
        key, other = renew(), renew_other()
        assert len(key) == PLAN_KEY_BYTES
        assert keys.prove(TERMS, TERMS.mac(key))
        assert not others.prove(TERMS, TERMS.mac(key)), "one worker's key is worth nothing at another"
        assert not keys.prove(TERMS, TERMS.mac(other))
        assert not keys.prove(TERMS, b"")
        assert not keys.prove(TERMS, TERMS.mac(key)[:-1])
    assert not PlanKeys().prove(TERMS, TERMS.mac(b"")), "without a router nothing is proved"


@pytest.mark.parametrize(
    "other",
    [
        {"request_id": "r2"},
        {"epoch": 2},
        {"namespace": b"m" * 16},
        {"cache_root": b"d" * 32},
        {"prefill": ""},
        {"decode": "10.0.0.9:7000"},
        {"sources": ("10.0.0.3:7000",)},
        {"sources": ("10.0.0.4:7000", "10.0.0.3:7000")},
        {"sources": ("10.0.0.3:700", "010.0.0.4:7000")},
        {"prefill": "10.0.0.1:700", "decode": "010.0.0.2:7000"},
    ],
)
def test_every_term_is_covered(other):
    keys = PlanKeys()
    with keys.of_stream() as renew:
        mac = TERMS.mac(renew())
        assert not keys.prove(replace(TERMS, **other), mac)


def test_a_key_that_was_replaced_is_believed_for_a_while():
    now = 0.0
    keys = PlanKeys(lambda: now)
    with keys.of_stream() as renew:
        key = renew()
        now = 1000.0
        assert keys.prove(plan(1), plan(1).mac(key)), "a worker that was stopped has replaced nothing"
        newer = renew()
        now += RENEW_S - 1
        assert keys.prove(plan(2), plan(2).mac(key))
        now += 1
        assert not keys.prove(plan(3), plan(3).mac(key))
        assert keys.prove(plan(3), plan(3).mac(newer))
    now += RENEW_S
    assert not keys.prove(plan(4), plan(4).mac(newer)), "the router has gone"


def test_what_a_plan_allows_it_allows_once():
    """Who was shown a capability, and who repeats what went over a connection, gets nothing for it."""
    keys = PlanKeys()
    with keys.of_stream() as renew, keys.of_stream() as of_another_router:
        key, other = renew(), of_another_router()
        assert keys.prove(TERMS, TERMS.mac(key))
        assert not keys.prove(TERMS, TERMS.mac(key))
        renew()
        assert not keys.prove(TERMS, TERMS.mac(key)), "as long as the key is believed"
        assert keys.prove(plan(2), plan(2).mac(key)), "the next plan of the request"
        assert keys.prove(TERMS, TERMS.mac(other)), "another router's plan"


def test_old_keys_are_forgotten():
    now = 0.0
    keys = PlanKeys(lambda: now)
    with keys.of_stream() as renew:
        for _ in range(100):
            now += RENEW_S
            renew()
    assert len(keys._live) <= 2
