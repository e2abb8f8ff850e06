"""What the table knows of a block's origin and use; and what of it the wire refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from tests.services.kvstore.helpers import client_of, puts, raw, refusal, settings
from tests.services.kvstore.test_store_machine import BLOCK_BYTES, TREE, Owners

from penstock.kv.client.client import Origin
from penstock.kv.eviction import POLICIES, SEVERAL
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.sessions import SessionPhase
from penstock.kvstore.table.blocks import Wanted, Written
from penstock.kvstore.table.table import BlockTable
from penstock.runtime.config import ConfigError
from penstock.v1 import kvstore_pb2

NAMESPACE = b"n" * 16


def test_a_block_knows_whose_it_is_what_it_cost_and_when_it_was_used() -> None:
    store = BlockTable(4, BLOCK_BYTES, Owners())
    store.attach("s", "test")
    wanted = Wanted(TREE[0].key, TREE[0].parent, 0, 0.25, "one", NAMESPACE)
    [reserved] = store.puts.reserve("s", [wanted], 1.0)
    block = reserved.block
    assert block is not None
    store.puts.commit("s", [Written(block.key, block.epoch, b"c" * 16)], 2.0)
    assert (block.session, block.namespace, block.seconds) == ("one", NAMESPACE, 0.25)
    assert (block.uses, block.used_at, block.retained_until) == (0, 2.0, 0.0)
    store.leases.take("s", [block.key], 1.0, 3.0, "two")
    assert (block.session, block.uses, block.used_at) == (SEVERAL, 1, 3.0)
    store.leases.take("s", [block.key], 1.0, 3.5)
    assert (block.uses, block.used_at) == (1, 3.5), "so close together it is one use"
    store.puts.reserve("s", [wanted], 4.0)
    assert (block.session, block.uses, block.used_at) == (SEVERAL, 2, 4.0)


def test_one_session_stays_the_owner_and_unknown_is_nobody() -> None:
    store = BlockTable(4, BLOCK_BYTES, Owners())
    store.attach("s", "test")
    [reserved] = store.puts.reserve("s", [Wanted(TREE[0].key, TREE[0].parent, 0)], 1.0)
    block = reserved.block
    assert block is not None
    store.puts.commit("s", [Written(block.key, block.epoch, b"c" * 16)], 2.0)
    for session, owner in (("", ""), ("one", "one"), ("", "one"), ("one", "one"), ("two", SEVERAL)):
        store.leases.take("s", [block.key], 1.0, 3.0, session)
        assert block.session == owner


async def test_the_client_sends_it() -> None:
    blocks = [replace(block, seconds=0.5) for block in puts(3)]
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        assert await client.put(blocks, Origin("talk", NAMESPACE)) == 3
        found = [store.host.table.find(block.key) for block in blocks]
        assert [(one.session, one.namespace, one.seconds) for one in found] == [("talk", NAMESPACE, 0.5)] * 3
        async with client.lease([blocks[0].key], Origin("other")):
            assert [one.session for one in found] == [SEVERAL, "talk", "talk"]


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("namespace", {"namespace": b"short"}, "must have 0 or 16"),
        ("session", {"session": "x" * 65}, "at most 64"),
    ],
)
async def test_an_origin_that_can_not_be_is_refused(field: str, wrong: dict[str, Any], right: str) -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as client:
        attachment = await client.attach()
        request = kvstore_pb2.ReserveRequest(attachment_id=attachment, length=4096, **wrong)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Reserve(request)
        code, text = refusal(caught.value)
        assert (code, field in text, right in text) == ("INVALID_ARGUMENT", True, True)


async def test_seconds_that_are_no_time_are_refused() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as client:
        attachment = await client.attach()
        block = puts(1)[0]
        for seconds in (-1.0, float("nan"), float("inf")):
            wanted = kvstore_pb2.ReserveBlock(key=block.key, parent=block.parent, seconds=seconds)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stub.Reserve(
                    kvstore_pb2.ReserveRequest(attachment_id=attachment, length=4096, blocks=[wanted])
                )
            assert refusal(caught.value)[0] == "INVALID_ARGUMENT"


async def test_a_lease_tells_that_its_session_is_active() -> None:
    async with open_kvstore(settings()) as store, client_of(store.address) as client:
        async with client.lease([block.key for block in puts(1)], Origin("talk")):
            outlook = store.store.sessions.known("talk")
        assert outlook is not None
        assert outlook.state is SessionPhase.ACTIVE


async def test_the_eviction_policy_is_a_setting() -> None:
    for name in POLICIES:
        async with open_kvstore(settings(eviction=name)) as store, client_of(store.address) as client:
            assert await client.put(puts(3)) == 3
            assert store.stats().blocks == 3
    with pytest.raises(ConfigError, match="eviction = 'fifo': must be worth, s3-fifo or lru"):
        settings(eviction="fifo")
