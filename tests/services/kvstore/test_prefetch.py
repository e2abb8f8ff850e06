"""A session that is expected back finds its blocks in memory, before it asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.services.kvstore.helpers import client_of, disk_has, eventually, keys, puts, raw, settings

from penstock.kv.client.client import Origin
from penstock.kv.eviction.base import SEVERAL
from penstock.kvstore.service import open_kvstore
from penstock.kvstore.table.blocks import Block
from penstock.kvstore.tiers.disk.movement import Ends
from penstock.v1 import common_pb2

TALK = Origin("talk", b"a" * 16)


@pytest.mark.parametrize("how", ["a hint", "the usual gap"])
async def test_from_the_disk_ahead_of_time(tmp_path: Path, how: str) -> None:
    """The turn before leased a slice, as workers do, and wrote its own blocks behind it."""
    blocks = puts(12, "talk")
    names = [block.key for block in blocks]
    config = settings(64, nvme_dir=tmp_path, nvme_bytes=2 << 20)
    async with open_kvstore(config) as store, client_of(store.address) as client, raw(store.address) as other:
        disk, host = store.disk, store.host.table
        assert disk is not None
        await eventually(lambda: disk.figures()["slots"])
        async with client.lease(names[:4], TALK):  # a first turn finds nothing
            pass
        await client.put(blocks[:8], TALK)
        async with client.lease(names[6:8], TALK):
            pass
        await client.put(blocks[8:], TALK)
        await eventually(lambda: disk_has(store, names) == 12)
        number = 0
        while any(name in host for name in names):
            number += 1
            await client.put(puts(16, f"flood {number}"))
        await eventually(lambda: not disk.figures()["pending"])

        tool = common_pb2.SessionHint(session="talk", state=common_pb2.SESSION_STATE_TOOL)
        if how == "a hint":
            tool.returns_in_s = 1.0
        else:
            for state in (common_pb2.SESSION_STATE_TOOL, common_pb2.SESSION_STATE_ACTIVE):  # others' tools take no time
                said = common_pb2.SessionHint(session="another", state=state)
                await other.stub.Hint(common_pb2.HintRequest(hints=[said]))
        assert host.lookup(names) == 0
        await other.stub.Hint(common_pb2.HintRequest(hints=[tool]))
        await eventually(lambda: host.lookup(names) == 12)
        assert disk.figures()["prefetched"] >= 1


def test_the_end_of_a_session() -> None:
    blocks = [Block(key, keys(5)[at - 1] if at else b"root", at * 16, at, at, "s", session="a")
              for at, key in enumerate(keys(5))]  # fmt: skip
    stored = {block.key: block for block in blocks}
    ends = Ends(most=2)
    for block in blocks:
        ends.at("a", block.key)
    assert ends.chain("a", stored.get) == keys(5)
    assert ends.chain("b", stored.get) == []
    ends.gone(stored.pop(keys(5)[4]))
    assert ends.chain("a", stored.get) == keys(4), "what is left of it"
    ends.gone(blocks[1])
    assert ends.chain("a", stored.get) == keys(4), "not its end"
    del stored[keys(5)[0]]
    assert ends.chain("a", stored.get) == [], "without its beginning it is good for nothing"
    for nobody in ("", SEVERAL):
        ends.at(nobody, blocks[1].key)
        assert ends.chain(nobody, stored.get) == []
    for other in "bc":
        ends.at(other, blocks[2].key)
    stored[keys(5)[0]] = blocks[0]
    assert [len(ends.chain(name, stored.get)) for name in "abc"] == [0, 3, 3], "the longest silent is forgotten"
