"""The block table against the naive one, in any order of events that Hypothesis finds."""

from __future__ import annotations

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from tests.services.kvstore.naive import NaiveRetention, NaiveStore

from penstock.kv.eviction import make_policy
from penstock.kv.eviction.promised import KeepPromised
from penstock.kvstore.table.blocks import Block, Wanted, Written
from penstock.kvstore.table.promises import Promises
from penstock.kvstore.table.table import BlockTable

SLOTS = 5
BLOCK_BYTES = 64
RESERVE_S, COOLING_S = 4.0, 2.0
PROMISES = 4, 3, 6.0
TENANTS = b"a" * 16, b"b" * 16
ROOT = bytes(32)


def _tree(count: int) -> list[Wanted]:
    """A binary tree of blocks."""
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(count)]
    parents = [ROOT] + [keys[(number - 1) // 2] for number in range(1, count)]
    return [Wanted(key, parent, 0) for key, parent in zip(keys, parents, strict=True)]


TREE = _tree(11)
NUMBERS = st.lists(st.integers(0, len(TREE) - 1), max_size=5)


def chain(last: int) -> list[bytes]:
    """The keys from the root down to block `last`."""
    path = [last]
    while path[-1]:
        path.append((path[-1] - 1) // 2)
    return [TREE[number].key for number in reversed(path)]


class Owners:
    """Sees every change of hands, and that none is from one hand to another."""

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}
        self.used: set[int] = set()
        self.listed: set[bytes] = set()
        self.evicted: list[bytes] = []

    def block_stored(self, block: Block) -> None:
        assert block.key not in self.listed
        assert self.epochs[block.slot] == block.epoch
        self.listed.add(block.key)

    def block_removed(self, block: Block) -> None:
        self.listed.remove(block.key)
        self.evicted.append(block.key)

    def slot_held(self, slot: int, epoch: int) -> None:
        assert bool(self.epochs.get(slot, 0)) != bool(epoch), "from nobody to somebody, or back"
        assert epoch not in self.used or not epoch, "an epoch came twice"
        self.used.add(epoch)
        self.epochs[slot] = epoch


class StoreMachine(RuleBasedStateMachine):
    attachments = Bundle("attachments")
    reservations = Bundle("reservations")
    leases = Bundle("leases")
    policy_name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.owners = Owners()
        self.now = 0.0
        self.policy = KeepPromised(make_policy(self.policy_name, lambda: self.now), lambda: self.now)
        self.store = BlockTable(
            *(SLOTS, BLOCK_BYTES, self.owners),
            policy=lambda: self.policy,
            promises=Promises(*PROMISES),
            reserve_s=RESERVE_S,
            cooling_s=COOLING_S,
        )
        lru = self.policy_name == "lru"
        self.naive = NaiveStore(SLOTS, RESERVE_S, COOLING_S, lru=lru, promises=NaiveRetention(*PROMISES))
        self.count = 0

    def _begin(self) -> None:
        self.naive.expire(self.now)
        self.naive.tick += 1
        self.owners.evicted.clear()

    @rule(target=attachments)
    def attach(self) -> str:
        self.count += 1
        attachment = f"s{self.count}"
        self.store.attach(attachment, "test")
        self.naive.attachments.add(attachment)
        return attachment

    @rule(attachment=consumes(attachments))
    def detach(self, attachment: str) -> None:
        self._begin()
        self.store.expire(self.now)
        self.store.detach(attachment, self.now)
        self.naive.detach(attachment, self.now)

    @rule(target=reservations, attachment=attachments, numbers=NUMBERS)
    def reserve(self, attachment: str, numbers: list[int]):
        return multiple(*self._reserve(attachment, numbers))

    @rule(target=reservations, attachment=attachments, numbers=NUMBERS)
    def put(self, attachment: str, numbers: list[int]):
        reserved = self._reserve(attachment, numbers)
        for reservation in reserved:
            self.commit(reservation, True)
        return multiple(*reserved)

    def _reserve(self, attachment: str, numbers: list[int]) -> list[tuple[str, bytes, int]]:
        if attachment not in self.naive.attachments:
            return []
        self._begin()
        answers = self.store.puts.reserve(attachment, [TREE[number] for number in numbers], self.now)
        evicted, without_room = list(self.owners.evicted), set[bytes]()
        for number, answer in zip(numbers, answers, strict=True):
            epoch = answer.block.epoch if answer.block else 0
            state = self.naive.reserve(attachment, TREE[number], self.now, epoch, evicted, without_room=without_room)
            assert state is answer.state
        assert not evicted, "evicted without need"
        return [(attachment, one.block.key, one.block.epoch) for one in answers if one.block is not None]

    @rule(reservation=reservations, good=st.booleans())
    def commit_later(self, reservation: tuple[str, bytes, int], good: bool) -> None:
        self.commit(reservation, good)

    def commit(self, reservation: tuple[str, bytes, int], good: bool) -> None:
        """Also of reservations that are over: they stay in the bundle."""
        attachment, key, epoch = reservation
        if attachment not in self.naive.attachments:
            return
        self._begin()
        written = Written(key, epoch, b"c" * 16 if good else b"")
        expected = self.naive.commit(attachment, key, epoch, good, self.now)
        assert self.store.puts.commit(attachment, [written], self.now) == [expected]

    @rule(attachment=attachments, reservation=reservations)
    def commit_of_another(self, attachment: str, reservation: tuple[str, bytes, int]) -> None:
        owner, key, epoch = reservation
        if attachment in self.naive.attachments and owner != attachment:
            self._begin()
            assert self.store.puts.commit(attachment, [Written(key, epoch, b"c" * 16)], self.now) == [False]

    @rule(target=leases, attachment=attachments, last=st.integers(0, len(TREE) - 1), seconds=st.integers(1, 5))
    def lease_chain(self, attachment: str, last: int, seconds: int):
        return self._lease(attachment, chain(last), seconds)

    @rule(target=leases, attachment=attachments, count=st.integers(1, 3), more=NUMBERS, seconds=st.integers(1, 5))
    def lease_stored(self, attachment: str, count: int, more: list[int], seconds: int):
        stored = [one.key for one in self.naive.holdings if one.state == "stored"]
        return self._lease(attachment, stored[-count:] + [TREE[number].key for number in more], seconds)

    def _lease(self, attachment: str, keys: list[bytes], seconds: int):
        if attachment not in self.naive.attachments:
            return multiple()
        self._begin()
        expected = self.naive.prefix(keys)
        lease = self.store.leases.take(attachment, keys, seconds, self.now)
        assert [one.epoch for one in expected] == ([block.epoch for block in lease.blocks] if lease else [])
        assert self.store.lookup(keys) == len(expected)
        if lease is None:
            return multiple()
        self.naive.lease(attachment, lease.lease_id, keys, self.now + seconds)
        self.naive.promises.refresh([one.key for one in expected], self.now)
        return attachment, lease.lease_id

    @rule(
        attachment=attachments,
        last=st.integers(0, len(TREE) - 1),
        tenant=st.sampled_from(TENANTS),
        ttl=st.integers(0, 9),
    )
    def retain(self, attachment: str, last: int, tenant: bytes, ttl: int) -> None:
        if attachment in self.naive.attachments:
            self._begin()
            expected = self.naive.promises.grant(tenant, chain(last), ttl, self.now)
            assert self.store.promise(chain(last), ttl, tenant, self.now) == expected

    @rule(lease=leases)
    def release(self, lease: tuple[str, int]) -> None:
        attachment, lease_id = lease
        if attachment not in self.naive.attachments:
            return
        self._begin()
        expected = lease_id in self.naive.leases
        assert self.store.leases.release(attachment, [lease_id], self.now) == [expected]
        if expected:
            self.naive.release(lease_id, self.now)

    @rule(attachment=attachments, reservation=reservations)
    def quarantine_late(self, attachment: str, reservation: tuple[str, bytes, int]) -> None:
        self.quarantine(attachment, reservation)

    def quarantine(self, attachment: str, reservation: tuple[str, bytes, int]) -> None:
        if attachment not in self.naive.attachments:
            return
        self._begin()
        self.store.expire(self.now)
        _, key, epoch = reservation
        assert self.store.quarantine(attachment, key, epoch, self.now) == self.naive.quarantine(key, epoch, self.now)

    @rule(attachment=attachments, number=st.integers(0, len(TREE) - 1))
    def quarantine_stored(self, attachment: str, number: int) -> None:
        stored = self.naive.find(TREE[number].key, "stored")
        if stored is not None:
            self.quarantine(attachment, (attachment, stored.key, stored.epoch))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._begin()
        self.store.expire(self.now)

    @invariant()
    def agree(self) -> None:
        stats = self.store.stats()
        states = [one.state for one in self.naive.holdings]
        assert stats.blocks == states.count("stored")
        assert len(self.policy) == len(self.naive.evictable(b"")), "on offer is what may go"
        assert stats.reserved == states.count("reserved")
        assert stats.detached == states.count("detached")
        assert stats.cooling == len(self.naive.cooling)
        assert stats.leases == len(self.naive.leases)
        assert stats.retained == len(self.naive.promises.live(self.now)) <= PROMISES[0]
        assert stats.used_bytes == len(states) * BLOCK_BYTES
        assert set(self.store.keys()) == self.owners.listed
        assert self.owners.listed == {one.key for one in self.naive.holdings if one.state == "stored"}
        held = sorted(epoch for epoch in self.owners.epochs.values() if epoch)
        assert held == sorted(one.epoch for one in self.naive.holdings), "one slot, one owner"

    def teardown(self) -> None:
        """Everybody leaves, time goes by: only stored blocks are left."""
        for attachment in list(self.naive.attachments):
            self.store.detach(attachment, self.now)
        self.store.expire(self.now + 100)
        stats = self.store.stats()
        assert (stats.reserved, stats.detached, stats.cooling, stats.leases, stats.attachments) == (0, 0, 0, 0, 0)
        assert stats.used_bytes == stats.blocks * BLOCK_BYTES


class S3FifoMachine(StoreMachine):
    policy_name = "s3-fifo"


class WorthMachine(StoreMachine):
    policy_name = "worth"


for machine in (StoreMachine, S3FifoMachine, WorthMachine):
    machine.TestCase.settings = settings(
        max_examples=200, stateful_step_count=50, suppress_health_check=list(HealthCheck)
    )
TestStore = StoreMachine.TestCase
TestStoreS3Fifo = S3FifoMachine.TestCase
TestStoreWorth = WorthMachine.TestCase
