"""A tenant beyond its share pays with its own blocks: laws against a naive twin, and what a victim costs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.services.kvstore.helpers import client_of, keys, puts, read, settings

from penstock.kv.client.client import Origin
from penstock.kv.eviction import Lru, make_policy
from penstock.kv.eviction.promised import KeepPromised
from penstock.kv.eviction.shares import TenantShares
from penstock.kvstore.service import open_kvstore
from penstock.runtime.config import ConfigError

from .helpers import Item, key

TENANTS = [b"a", b"b", b"c", b"d"]


@dataclass(eq=False)
class Owned(Item):
    namespace: bytes = b""
    retained_until: float = 0.0


class Naive:
    """The rule itself, by looking at everything: an LRU under it."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.counted: list[Owned] = []
        self.offers: list[Owned] = []
        self.most = 0

    def count(self, item: Owned) -> None:
        self.counted.append(item)
        self.most = max(self.most, len(self.counted))

    def victim(self) -> Owned | None:
        def held(tenant: bytes) -> int:
            return sum(item.namespace == tenant for item in self.counted)

        if not self.offers:
            return None
        victim = min(self.offers, key=lambda item: item.used)
        over = {name for name in TENANTS if held(name) > self.share * self.most}
        mine = {item.namespace for item in self.offers} & over
        if mine and victim.namespace not in over:
            greedy = min(mine, key=lambda name: (-held(name), name))
            victim = min((item for item in self.offers if item.namespace == greedy), key=lambda item: item.used)
        self.offers.remove(victim)
        self.counted.remove(victim)
        return victim


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "victim", "use", "pin", "offer", "remove", "spare"]),
        st.integers(0, 10**6),
        st.sampled_from([*TENANTS, b"a", b"a"]),
    ),
    max_size=120,
)


@hypothesis_settings(max_examples=200)
@given(STEPS, st.sampled_from([0.0, 0.1, 0.25, 0.34, 0.5, 0.9]))
def test_it_is_what_looking_at_all_blocks_gives(steps: list[tuple[str, int, bytes]], share: float) -> None:
    policy: TenantShares[Owned] = TenantShares(Lru(), share)
    naive = Naive(share)
    stored: list[Owned] = []
    for tick, (step, number, tenant) in enumerate(steps, 1):
        item = stored[number % len(stored)] if stored else None
        if step == "store":
            item = Owned(key(tick), used=tick, namespace=tenant)
            stored.append(item)
            policy.block_stored(item)
            policy.offer_block(item)
            naive.count(item)
            naive.offers.append(item)
        elif step in ("victim", "spare"):
            victim = policy.next_victim()
            assert victim is naive.victim()
            if victim is not None and step == "victim":
                stored.remove(victim)
                policy.block_removed(victim)
            elif victim is not None:
                policy.offer_block(victim)
                naive.count(victim)
                naive.offers.append(victim)
        elif item is None:
            continue
        elif step in ("use", "offer"):
            item.used = tick
            policy.block_used(item)
            policy.offer_block(item)
            if item not in naive.offers:
                naive.offers.append(item)
        else:
            policy.withdraw_block(item)
            if item in naive.offers:
                naive.offers.remove(item)
            if step == "remove":
                stored.remove(item)
                policy.block_removed(item)
                naive.counted.remove(item)
        assert len(policy) == len(naive.offers)


def fill(policy: TenantShares[Owned] | KeepPromised[Owned], tenant: bytes, many: int, since: int) -> list[Owned]:
    items = [Owned(key(since + at), 512, since + at, used_at=float(since + at), namespace=tenant) for at in range(many)]
    for item in items:
        policy.block_stored(item)
        policy.offer_block(item)
    return items


@pytest.mark.parametrize("name", ["worth", "s3-fifo", "lru"])
def test_one_that_stores_without_end_pushes_out_its_own(name: str) -> None:
    """Another tenant's blocks are older and would go first; they stay, down to the last eviction."""
    policy: TenantShares[Owned] = TenantShares(make_policy(name, lambda: 1e6), 0.5)
    quiet = fill(policy, b"quiet", 40, 0)
    fill(policy, b"loud", 60, 1000)
    for at in range(500):
        victim = policy.next_victim()
        assert victim is not None and victim.namespace == b"loud"
        policy.block_removed(victim)
        fill(policy, b"loud", 1, 2000 + at)
    assert len(policy) == 100 and all(item.key in policy._counted for item in quiet)


def test_victims_that_are_only_held_count_as_gone_and_spared_ones_do_not() -> None:
    """The disk holds many victims while it saves them: a tenant pays with what it has too many, not with more."""
    policy: TenantShares[Owned] = TenantShares(Lru(), 0.5)
    fill(policy, b"quiet", 40, 0)
    fill(policy, b"loud", 60, 1000)
    for _ in range(2):
        held = [victim for _ in range(15) if (victim := policy.next_victim())]
        assert [victim.namespace for victim in held] == [b"loud"] * 10 + [b"quiet"] * 5
        for victim in held:
            policy.offer_block(victim)


def test_without_blocks_that_may_go_others_do_and_promises_come_first() -> None:
    policy: KeepPromised[Owned] = KeepPromised(TenantShares(Lru(), 0.5), lambda: 10.0)
    [old] = fill(policy, b"quiet", 1, 0)
    loud = fill(policy, b"loud", 3, 100)
    for item in loud[:2]:
        policy.withdraw_block(item)
        item.retained_until = 50.0
        policy.offer_block(item)
    assert policy.next_victim() is loud[2]
    assert policy.next_victim() is old, "what is promised to the other is not on offer"


def test_a_victim_costs_the_same_however_many_blocks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    original, counts = heapq.heappop, []
    for many in (100, 10_000):
        policy: TenantShares[Owned] = TenantShares(Lru(), 0.2)
        for place in range(many // 10):  # many tenants below their share, and older
            fill(policy, b"%d" % place, 5, place * 5)
        fill(policy, b"loud", many, 10**6)
        touched = 0

        def counting(heap: list, *entry: object):
            nonlocal touched
            touched += 1
            return original(heap, *entry)

        monkeypatch.setattr(heapq, "heappop", counting)
        for _ in range(50):
            victim = policy.next_victim()
            assert victim is not None and victim.namespace == b"loud"
        monkeypatch.undo()
        counts.append(touched)
    assert counts[1] <= 2 * counts[0] + 100


@pytest.mark.parametrize("share", [1.0, 0.25])
async def test_a_store_keeps_what_others_have_from_a_flood_of_one(share: float) -> None:
    """Over a real socket: without a bound the flood takes every slot, with one the quiet tenant's chain stays."""
    async with open_kvstore(settings(blocks=32, eviction="lru", tenant_share=share)) as store:
        async with client_of(store.address) as client:
            await client.put(puts(8, "quiet"), Origin(namespace=b"q" * 16))
            for number in range(60):
                await client.put(puts(2, f"flood {number} "), Origin(namespace=b"f" * 16))
            kept = len(await read(client, keys(8, "quiet")))
            assert kept == (8 if share < 1 else 0)
            assert len(await read(client, keys(2, "flood 59 "))) == 2


@pytest.mark.parametrize("share", [0.0, 0.001, 1.5])
def test_a_share_that_makes_no_sense_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="tenant_share"):
        settings(tenant_share=share)
