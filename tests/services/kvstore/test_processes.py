"""Stores and clients as processes that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    HOST,
    StoreProcess,
    client_of,
    eventually,
    keys,
    puts,
    raw,
    read,
)

from penstock.kv.client import client as client_module
from penstock.kv.client.client import StoreClient, StoreFault
from penstock.kvstore import service as service_module

pytestmark = pytest.mark.mesh

HOLD = """
import asyncio, sys
from penstock.kv.client.client import open_store, BlockPut
from penstock.kv.spec import KvSpec
from penstock.rpc.channels import open_channels
from penstock.v1 import kvstore_pb2

async def main(address, host, stored):
    spec = KvSpec(model="ab" * 32, tokenizer="cd" * 32, layout="v1", dtype="float32", block_size=16, block_bytes=4096)
    async with open_channels() as channels, open_store(channels.to(address, "store"), "doomed", spec, host) as store:
        async with store.lease([bytes.fromhex(stored)]) as leased:
            assert len(leased.blocks) == 1
            room = [kvstore_pb2.ReserveBlock(key=bytes([n] * 32), parent=bytes(32)) for n in range(1, 6)]
            mine = store._link.attachment.attachment_id
            request = kvstore_pb2.ReserveRequest(attachment_id=mine, blocks=room, length=4096)
            await store._link.rpc.Reserve(request)
            print("holding", flush=True)
            await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    process = StoreProcess()
    yield process
    process.close()


def import_path() -> dict[str, str]:
    """An environment in which `import penstock` finds this checkout."""
    files = [Path(module.__file__ or "") for module in (client_module, service_module)]
    paths = [str(parent.parent) for file in files for parent in file.parents if parent.name == "penstock"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start_holding(address: str, stored: bytes) -> subprocess.Popen[str]:
    """A client that holds a lease and five reservations, and does not let go."""
    command = [sys.executable, "-c", HOLD, address, HOST, stored.hex()]
    child = subprocess.Popen(command, env=import_path(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert any(line == "holding\n" for line in child.stdout)
    return child


def arenas_mapped() -> int:
    """Arenas that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:penstock-kv" in line for line in lines)


def names() -> set[str]:
    return set(os.listdir("/dev/shm")) | {name for name in os.listdir("/tmp") if "penstock" in name}


async def test_a_killed_client_loses_all_that_it_held(store: StoreProcess) -> None:
    async with raw(store.address) as one, client_of(store.address) as client:
        await client.put(puts(1))
        baseline = await one.stats()
        with await asyncio.to_thread(start_holding, store.address, keys(1)[0]) as child:
            held = await one.stats()
            assert (held.leases, held.reserved, held.attachments) == (1, 5, 2)
            begin = time.monotonic()
            child.kill()
            after = await one.settle(lambda stats: stats.attachments == 1)
            assert time.monotonic() - begin < 5
        assert (after.leases, after.reserved, after.used_bytes) == (0, 0, BLOCK_BYTES)
        rested = await one.settle(lambda stats: stats.cooling == 0)
        assert (rested.used_bytes, rested.blocks) == (baseline.used_bytes, baseline.blocks)


async def test_a_client_survives_its_store(store: StoreProcess) -> None:
    before, mapped = names(), arenas_mapped()
    blocks = puts(4)
    async with client_of(store.address) as client:
        for life in range(1, 4):
            await eventually(lambda: client.connected)
            assert client.stats.attached == life
            assert arenas_mapped() == mapped + 1, "the arena of the dead store is unmapped"
            assert await client.put(blocks) == 4
            async with client.lease(keys(4)) as leased:
                store.kill()
                await eventually(lambda: not client.connected)
                assert [bytes(view) for view in leased.blocks] == [bytes(block.data) for block in blocks]
                assert leased.still_valid(), "a dead store gives no slot to anybody"
            assert arenas_mapped() == mapped
            with pytest.raises(StoreFault):
                await client.lookup(keys(1))
            store.restart()
        await eventually(lambda: client.connected)
    assert arenas_mapped() == mapped
    store.kill()
    assert names() == before, "no name is left behind"


async def test_a_store_that_hangs_costs_one_time_limit(store: StoreProcess) -> None:
    async with client_of(store.address, timeout_s=0.3) as client:
        await client.put(puts(2))
        store.process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(StoreFault):
            await read(client, keys(2))
        assert 0.2 < time.monotonic() - begin < 2
        begin = time.monotonic()
        for _ in range(100):
            with pytest.raises(StoreFault):
                await client.lookup(keys(1))
        assert time.monotonic() - begin < 0.5
        store.process.send_signal(signal.SIGCONT)
        await eventually(lambda: client.connected)
        assert len(await read(client, keys(2))) == 2


async def work(client: StoreClient, number: int, third_round: Callable[[], None]) -> int:
    """Puts and reads one chain until the store is gone; returns how often that worked."""
    blocks = puts(20, f"c{number}")
    for done in itertools.count():
        if done == 3:
            third_round()
        try:
            await client.put(blocks)
            copies = await read(client, keys(20, f"c{number}"))
        except StoreFault:
            return done
        assert copies == [bytes(block.data) for block in blocks[: len(copies)]]
    raise AssertionError


async def test_a_killed_store_in_the_middle_of_everything(store: StoreProcess) -> None:
    """Calls under way end in a fault or an answer, and what was read is right."""
    async with client_of(store.address) as client, client_of(store.address, host="x") as remote:
        for _ in range(3):
            await eventually(lambda: client.connected and remote.connected)
            each = [work((client, remote)[number % 2], number, store.kill) for number in range(4)]
            assert sum(await asyncio.gather(*each)) >= 3
            store.restart()


def test_the_store_and_its_client_are_light() -> None:
    code = (
        "import sys, penstock.kvstore.__main__, penstock.kv.client\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=import_path(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_store_is_ready_soon_and_ends_when_told(store: StoreProcess) -> None:
    begin = time.monotonic()
    second = StoreProcess()
    assert time.monotonic() - begin < 10, "1.5 s on an idle machine; this only catches the absurd"
    second.process.terminate()
    assert second.process.wait(10) == 0
    second.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host-bytes", "9TiB"], "this machine has .* of memory"),
        (["--host-bytes", "much"], "not a size"),
        (["--address", "nowhere"], "host:port"),
    ],
)
def test_bad_settings_end_it_with_one_clear_line(arguments: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "penstock.kvstore", *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(said, done.stderr + done.stdout)
    assert "Traceback" not in done.stderr
