"""Stores without a router find each other's blocks: the home of a key knows who has it."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from tests.services.kvstore.helpers import client_of, eventually, keys, puts, settings

from penstock.kvstore.elsewhere.homes import home
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.rpc.channels import Channels


async def test_the_home_of_a_key_is_asked_when_nobody_was_named() -> None:
    """Three stores without a router: what the first has, the third finds, whoever of them is the key's home."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stores: list[KvStore] = []
        for number in range(3):
            stores.append(await enter(open_kvstore(settings(host_id=f"h{number}", bring_s=10.0))))
        for store in stores:
            store.elsewhere.neighbours.set_joined([other.address for other in stores])
        writer = await enter(client_of(stores[0].address, host="h0"))
        blocks = puts(16)
        await writer.put(blocks)
        known = [store.elsewhere.neighbours.directory for store in stores]
        others = frozenset(store.address for store in stores)
        names = keys(16)

        homes = {name: home(name, others) for name in names}
        told = [name for name in names if homes[name] != stores[0].address]
        await eventually(lambda: all(any(one.holders(name, others) for one in known[1:]) for name in told))
        reader = await enter(client_of(stores[2].address, host="h2"))
        async with reader.lease(names) as leased:
            assert [bytes(view) for view in leased.blocks] == [bytes(block.data) for block in blocks]
            assert leased.tiers == ["remote"] * 16
        figures = stores[2].elsewhere.figures()
        assert figures["homes_knew"] >= 1
        async with reader.lease(keys(3, "unheard of")) as leased:
            assert leased.blocks == []
        for where in others:  # also when the home is the one that holds it, and when it is the one that asks
            name = next((name for name in homes if homes[name] == where), None)
            if name is not None and where != stores[1].address:
                middle = stores[1].elsewhere.neighbours
                assert await middle.who_has(name, time.monotonic() + 5), where


def test_strangers_are_not_believed() -> None:
    neighbours = Neighbours(["a:1"], Channels(), max_keys=10)
    neighbours.heard("evil:1", keys(2), [])
    neighbours.heard("a:1", keys(1), [])
    assert len(neighbours.directory) == 1
    assert neighbours.usable(["evil:1", "a:1", "a:1"]) == ["a:1"]


async def test_a_store_that_joins_is_told_of_the_keys_that_it_is_now_the_home_of() -> None:
    async with AsyncExitStack() as stack:
        stores: list[KvStore] = []
        for number in range(3):
            stores.append(await stack.enter_async_context(open_kvstore(settings(128, host_id=f"h{number}"))))
        names, addresses = keys(120), [store.address for store in stores]

        def told(number: int, members: list[str]) -> bool:
            """Whether a store knows exactly its share of what the first holds."""
            share = {name for name in names if home(name, members) == addresses[number]}
            directory = stores[number].elsewhere.neighbours.directory
            return {name for name in names if directory.holders(name, set(addresses))} >= share

        writer = await stack.enter_async_context(client_of(stores[0].address, host="h0"))
        await writer.put(puts(120))
        for store in stores[:2]:
            store.elsewhere.neighbours.set_joined(addresses[:2])
        await eventually(lambda: told(1, addresses[:2]))
        for store in stores:
            store.elsewhere.neighbours.set_joined(addresses)
        await eventually(lambda: told(2, addresses))
        share = sum(home(name, addresses) == addresses[2] for name in names)
        assert len(stores[2].elsewhere.neighbours.directory) == share, "and of no others"
