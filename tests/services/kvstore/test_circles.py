"""No block is its own ancestor, whatever clients, other stores and disks say: it could never be evicted."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.services.kvstore.disk.disks import Nobody
from tests.services.kvstore.helpers import BLOCK_BYTES, keys, puts, raw, settings

from penstock.errors import InvalidRequest
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import Block, ReserveState, Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.rpc.errors import from_rpc
from penstock.v1 import kvstore_pb2

NAMES = [bytes([at]) * 32 for at in range(1, 9)]
PAIRS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), min_size=1, max_size=5)


def block(key: bytes, parent: bytes) -> kvstore_pb2.ReserveBlock:
    return kvstore_pb2.ReserveBlock(key=key, parent=parent)


@pytest.mark.parametrize(
    ("calls", "field"),
    [
        ([[(0, 0)]], "blocks[0].parent"),
        ([[(0, 1), (1, 0)]], "blocks[1].parent"),
        ([[(0, 1)], [(1, 0)]], "blocks[0].parent"),
        ([[(0, 1), (1, 2)], [(3, 0), (2, 3)]], "blocks[1].parent"),
    ],
    ids=["itself", "one-call", "two-calls", "a-long-way-round"],
)
async def test_a_circle_is_refused(calls: list[list[tuple[int, int]]], field: str) -> None:
    """By name, before anything of the call is reserved; and the store is as useful afterwards as before."""
    async with open_kvstore(settings()) as store, raw(store.address) as one, raw(store.address) as two:
        await one.attach()
        await two.attach()
        requests = [
            kvstore_pb2.ReserveRequest(
                attachment_id=one.attached.attachment_id,
                blocks=[block(NAMES[key], NAMES[parent]) for key, parent in pairs],
                length=BLOCK_BYTES,
            )
            for pairs in calls
        ]
        for request in requests[:-1]:
            rooms = (await one.stub.Reserve(request)).blocks
            commits = [
                kvstore_pb2.CommitBlock(key=wanted.key, epoch=room.epoch, checksum=b"c" * 16)
                for wanted, room in zip(request.blocks, rooms, strict=True)
            ]
            attachment = one.attached.attachment_id
            await one.stub.Commit(kvstore_pb2.CommitRequest(attachment_id=attachment, blocks=commits))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Reserve(requests[-1])
        error = from_rpc(caught.value)
        assert isinstance(error, InvalidRequest) and error.field == field
        assert store.stats().reserved == 0
        count = store.stats().slots
        fresh = puts(count)
        assert await two.commit(fresh, (await two.reserve(fresh)).blocks) == [True] * count
        assert await two.lookup(keys(count)) == count, "everything else could leave"


def is_circle(parents: dict[bytes, bytes]) -> bool:
    """The slow way: climbs from every block."""
    for key in parents:
        at, steps = parents[key], 0
        while at in parents and at != key and steps <= len(parents):
            at, steps = parents[at], steps + 1
        if at == key:
            return True
    return False


@given(calls=st.lists(PAIRS, max_size=8), own=st.booleans())
@hypothesis_settings(max_examples=300)
def test_exactly_the_circles_are_refused_and_all_blocks_can_leave(
    calls: list[list[tuple[bytes, bytes]]], own: bool
) -> None:
    """By clients, and by what the store itself brings."""
    table, parents = BlockTable(len(NAMES), 64, Nobody()), dict[bytes, bytes]()
    table.attach("s", "test")
    for now, pairs in enumerate([[pair] for call in calls for pair in call] if own else calls):
        after = dict(parents)
        for key, parent in pairs:
            after.setdefault(key, parent)
        wanted = [Wanted(key, parent, 0) for key, parent in pairs]
        if own:
            answers = [table.puts.reserve_own(wanted[0], now)]
            assert (answers[0].state is ReserveState.FULL) == is_circle(after)
        elif is_circle(after):
            with pytest.raises(InvalidRequest):
                table.puts.reserve("s", wanted, now)
            continue
        else:
            answers = table.puts.reserve("s", wanted, now)
        for found in (answer.block for answer in answers):
            if found is not None:
                parents[found.key] = found.parent
                done = Written(found.key, found.epoch, b"c" * 16)
                assert table.puts.commit_own(done, now) if own else table.puts.commit("s", [done], now) == [True]
    while (victim := table.victims.hold(100.0)) is not None:
        assert table.victims.discard(victim, 100.0)
    assert table.stats().blocks == 0


def test_a_victim_that_is_spared_closes_no_circle() -> None:
    """While it is held its parent may leave, and must not come back as its child."""
    table = BlockTable(4, 64, Nobody())
    for key, parent in ((0, 7), (1, 0)):
        found = table.puts.reserve_own(Wanted(NAMES[key], NAMES[parent], 0), 0.0).block
        assert found is not None
        table.puts.commit_own(Written(found.key, found.epoch, b"c" * 16), 0.0)
    child, parent = table.victims.hold(0.0), table.victims.hold(0.0)
    assert child is not None and parent is not None
    assert table.victims.discard(parent, 0.0)
    assert table.puts.reserve_own(Wanted(parent.key, child.key, 0), 0.0).state is ReserveState.FULL
    table.victims.spare(child, 0.0)
    assert table.victims.hold(0.0) is child


@given(pairs=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), unique_by=lambda pair: pair[0]))
def test_what_a_disk_says_is_restored_without_circles(pairs: list[tuple[bytes, bytes]]) -> None:
    parents = dict(pairs)
    turning = {key for key in parents if key in _above(key, parents)}
    table = BlockTable(len(NAMES), 64, Nobody())
    table.restore([Block(key, parent, 0, at, at + 1, "") for at, (key, parent) in enumerate(pairs)], 0.0)
    assert set(table.keys()) == parents.keys() - turning
    while (victim := table.victims.hold(0.0)) is not None:
        assert table.victims.discard(victim, 0.0)
    assert table.stats().blocks == 0 and table.slots.free == len(NAMES)


def _above(key: bytes, parents: dict[bytes, bytes]) -> list[bytes]:
    """The ancestors of a block, as many as there are blocks at most."""
    found, at = list[bytes](), key
    while at in parents and len(found) < len(parents):
        at = parents[at]
        found.append(at)
    return found
