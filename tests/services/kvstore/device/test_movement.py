"""Who goes to the device and who comes back: the rules, and the table's part in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from tests.services.kvstore.helpers import ROOT, keys

from penstock.kv.eviction.base import SEVERAL
from penstock.kvstore.sessions import KnownSession, SessionPhase
from penstock.kvstore.table.blocks import Block, Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.device.movement import Movement

OUTLOOKS = {
    "active": KnownSession(SessionPhase.ACTIVE, 0.0, math.inf),
    "soon": KnownSession(SessionPhase.TOOL, 0.0, 129.0),
    "later": KnownSession(SessionPhase.USER, 0.0, 131.0),
    "unknown": KnownSession(SessionPhase.USER, 0.0, math.inf),
    "ended": KnownSession(SessionPhase.ENDED, 0.0, 101.0),
}
NOW = 100.0


def blocks(count: int, session: str = "", **other: int) -> list[Block]:
    names = keys(count)
    return [
        Block(name, names[at - 1] if at else ROOT, at * 16, at, at + 1, "", session=session, **other)
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("block", "goes_up"),
    [
        (blocks(1)[0], False),
        (blocks(1, uses=1)[0], True),
        (blocks(1, SEVERAL)[0], True),
        (blocks(1, "active")[0], True),
        (blocks(1, "soon")[0], True),
        (blocks(1, "later")[0], False),
        (blocks(1, "unknown")[0], False),
        (blocks(1, "ended")[0], False),
        (blocks(1, "nobody heard of it")[0], False),
    ],
    ids=lambda value: value.session or f"uses={value.uses}" if isinstance(value, Block) else str(value),
)
def test_what_will_be_asked_for_again_goes_up_and_is_not_lost_on_its_way_down(block: Block, goes_up: bool) -> None:
    assert Movement().promotes(block, OUTLOOKS.get, NOW) == goes_up
    assert Movement().demotes(block, OUTLOOKS.get, NOW) == goes_up
    block.retained_until = NOW + 1
    assert Movement().demotes(block, OUTLOOKS.get, NOW), "a promise holds in every tier"


def test_a_batch_keeps_the_order_of_the_prefix() -> None:
    chain = blocks(6, "active")

    def batch(candidates: list[Block], limit: int = 99, there: int = 0) -> list[int]:
        on_device = {block.key for block in chain[:there]}
        chosen = Movement().batch(candidates, limit, on_device.__contains__, OUTLOOKS.get, NOW)
        return [chain.index(block) for block in chosen]

    assert batch(chain) == [0, 1, 2, 3, 4, 5]
    assert batch(chain, limit=2) == [0, 1]
    assert batch(chain, there=2) == [2, 3, 4, 5]
    assert batch(chain[3:]) == [], "nobody could reach them"
    assert batch(chain[3:], there=3) == [3, 4, 5]
    assert batch([*chain, *chain]) == [0, 1, 2, 3, 4, 5]
    chain[2].session = ""
    assert batch(chain) == [0, 1]


@dataclass
class Watch:
    gone: list[bytes] = field(default_factory=list)
    holders: dict[int, int] = field(default_factory=dict)

    def block_stored(self, block: Block) -> None: ...

    def block_removed(self, block: Block) -> None:
        self.gone.append(block.key)

    def slot_held(self, slot: int, epoch: int) -> None:
        self.holders[slot] = epoch


def table(count: int, slots: int = 8) -> tuple[BlockTable, Watch]:
    watch, names = Watch(), keys(count)
    store = BlockTable(slots, 64, watch, cooling_s=1.0)
    for at, name in enumerate(names):
        block = store.puts.reserve_own(Wanted(name, names[at - 1] if at else ROOT, at * 16), 0.0).block
        assert block is not None
        store.puts.commit_own(Written(name, block.epoch, b"c" * 16), 0.0)
    return store, watch


def test_victims_are_those_of_as_many_evictions() -> None:
    store, watch = table(4)
    victims = [store.victims.hold(0.0) for _ in range(5)]
    assert [block and block.key for block in victims] == [*reversed(keys(4)), None]
    assert store.lookup(keys(4)) == 4, "all of them can still be found"
    assert not store.idle
    for block in victims[:3]:
        assert block is not None and store.victims.discard(block, 0.0)
    assert victims[3] is not None
    store.victims.spare(victims[3], 0.0)
    assert (store.lookup(keys(4)), store.slots.free, watch.gone) == (1, 7, list(reversed(keys(4)[1:])))
    assert store.stats().evictions == 3
    last = store.victims.hold(0.0)
    assert last is victims[3], "on offer once more"


def test_a_victim_that_somebody_needs_stays_and_so_do_its_ancestors() -> None:
    store, watch = table(3)
    store.attach("s", "test")
    child, parent = store.victims.hold(0.0), store.victims.hold(0.0)
    assert child is not None and parent is not None
    lease = store.leases.take("s", keys(3), 9.0, 0.0)
    assert lease is not None
    assert not store.victims.discard(child, 0.0) and not store.victims.discard(parent, 0.0)
    assert watch.gone == [] and store.victims.hold(0.0) is None
    store.detach("s", 0.0)
    again = store.victims.hold(0.0)
    assert again is child


def test_a_victim_may_get_a_child_or_be_condemned_meanwhile() -> None:
    store, watch = table(2)
    victim = store.victims.hold(0.0)
    assert victim is not None
    answer = store.puts.reserve_own(Wanted(b"n" * 32, victim.key, 32), 0.0)
    assert answer.block is not None
    assert not store.victims.discard(victim, 0.0), "its child would be an orphan"
    store.puts.commit_own(Written(b"n" * 32, answer.block.epoch, b""), 0.0)
    victim = store.victims.hold(0.0)
    assert victim is not None and victim.key == keys(2)[1]
    assert store.condemn(victim.key, victim.epoch, 0.0)
    assert not store.victims.discard(victim, 0.0)
    assert store.stats().cooling == 1, "not reused at once"
    store.expire(2.0)
    assert (store.slots.free, watch.gone, watch.holders[victim.slot]) == (7, [keys(2)[1]], 0)
    assert store.victims.hold(2.0) is not None, "the parent may go"
