"""The block table, call by call: what Hypothesis finds only by luck."""

from __future__ import annotations

from tests.services.kvstore.disk.disks import Nobody
from tests.services.kvstore.helpers import keys

from penstock.kvstore.table.blocks import ReserveState, Wanted, Written
from penstock.kvstore.table.table import BlockTable

A, B = keys(2)


def with_both() -> BlockTable:
    """Both are stored, neither is the other's parent, and they were used by the same call."""
    table = BlockTable(4, 64, Nobody())
    table.attach("s", "test")
    made = [one.block for one in table.puts.reserve("s", [Wanted(A, bytes(32), 0), Wanted(B, bytes(32), 0)], 0.0)]
    written = [Written(block.key, block.epoch, b"c" * 16) for block in made if block is not None]
    assert table.puts.commit("s", written, 0.0) == [True, True]
    return table


def test_a_block_that_the_store_itself_would_bring_is_used_later_than_what_was_used_before() -> None:
    """Also than what is offered again after that."""
    table = with_both()
    assert table.puts.reserve_own(Wanted(A, bytes(32), 0), 1.0).state is ReserveState.EXISTS
    other = table.hold(B)
    assert other is not None
    table.drop(other, 1.0)
    assert table.victims.hold(1.0) is other


def test_a_reservation_is_found_in_its_time_alone() -> None:
    table = BlockTable(4, 64, Nobody(), reserve_s=10.0)
    table.attach("s", "test")
    block = table.puts.reserve("s", [Wanted(A, bytes(32), 0)], 0.0)[0].block
    assert block is not None
    assert table.puts.find("s", A, block.epoch, 9.9) is block
    assert table.puts.find("s", A, block.epoch + 1, 9.9) is None
    assert table.puts.find("s", A, block.epoch, 10.0) is None


def test_what_has_no_room_for_its_parent_pushes_nothing_out() -> None:
    """A chain fills the table and grows by three: the second would follow a block that is not there, and may not take
    the place of the first one's parent."""
    chain = [Wanted(key, parent, 0) for key, parent in zip(keys(7), [bytes(32), *keys(6)], strict=True)]
    table = BlockTable(4, 64, Nobody())
    table.attach("s", "test")
    blocks = [one.block for one in table.puts.reserve("s", chain[:4], 0.0)]
    assert all(table.puts.commit("s", [Written(one.key, one.epoch, b"c" * 16) for one in blocks if one], 0.0))
    answers = table.puts.reserve("s", chain, 1.0)
    assert [one.state for one in answers] == [ReserveState.EXISTS] * 4 + [ReserveState.FULL] * 3
    assert table.stats().blocks == 4
    answers = table.puts.reserve("s", [*chain[4:6], Wanted(b"o" * 32, bytes(32), 0)], 2.0)
    assert [one.state for one in answers] == [ReserveState.FULL] * 2 + [ReserveState.WRITE], "others may take it"


def test_a_table_is_not_idle_while_victims_are_held() -> None:
    table = with_both()
    table.detach("s", 1.0)
    assert table.idle
    first, second = table.victims.hold(1.0), table.victims.hold(1.0)
    assert first is not None and second is not None
    assert table.victims.hold(1.0) is None and not table.idle
    table.victims.spare(second, 1.0)
    assert not table.idle
    assert table.victims.discard(first, 1.0)
    assert table.idle and table.stats().blocks == 1
