"""Mooncake Store as a transport: a real master and two stores, in a namespace with nothing but the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.services.kvstore.netns import command, impossible

from penstock.kvstore import service as service_module
from penstock.kvstore.elsewhere.transport import over_mooncake
from penstock.kvstore.elsewhere.transport.over_mooncake import MooncakeOptions, listening_everywhere
from penstock.runtime.config import ConfigError

LIBS = [str(Path(module.__file__ or "").parents[parts]) for module, parts in ((over_mooncake, 3), (service_module, 2))]


def missing() -> str:
    """Why Mooncake can't be tried here; empty when it can."""
    if find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install penstock[mooncake]"
    done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        return f"Mooncake can't be loaded: {done.stderr.strip().splitlines()[-1]}"
    return impossible()


WHY_NOT = missing()
needs_mooncake = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible")

COMMON = """
import asyncio, os, random, socket, subprocess, sys, time
from contextlib import asynccontextmanager
from pathlib import Path
import mooncake, psutil
from penstock.kv.bytes.checksum import checksum
from penstock.kv.spec import KvSpec
from penstock.kvstore.elsewhere.transport.base import Offered, TransportFault
from penstock.kvstore.elsewhere.transport.over_mooncake import MooncakeOptions, open_mooncake_transport
from penstock.runtime.config import ConfigError

SIZE = 64 << 10
SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="float32", block_size=16, block_bytes=SIZE)
KEYS = [bytes([n]) * 32 for n in range(1, 41)]

US, THEM = b"u" * 16, b"t" * 16

def free():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]

def listening(pid):
    return {c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"}

@asynccontextmanager
async def master():
    port = free()
    # its defaults are every interface: each address is given
    process = subprocess.Popen([
        str(Path(mooncake.__file__).parent / "mooncake_master"), "-rpc_address=127.0.0.1", f"-rpc_port={port}",
        "-metrics_host=127.0.0.1", f"-metrics_port={free()}", "-enable_http_metadata_server=false"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except OSError:
                    await asyncio.sleep(0.02)
        yield process, f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()

class Landing:
    def __init__(self, most=10**6, namespace=US):
        self.namespace = namespace
        self.buffers, self.landed_keys, self.offered, self.most = {}, [], [], most

    def room(self, offered):
        self.offered += offered
        for one in offered[: self.most]:
            self.buffers[one.key] = bytearray(SIZE)
        return [memoryview(self.buffers[one.key]) for one in offered[: self.most]]

    def landed(self, offered):
        self.landed_keys.append(offered.key)

def soon():
    return time.monotonic() + 20
"""

POOL = (
    COMMON
    + """
async def main():
    async with master() as (process, address):
        options = MooncakeOptions(master=address, host="127.0.0.1", lend_bytes=32 << 20, buffer_bytes=16 << 20)
        async with open_mooncake_transport(options) as one, open_mooncake_transport(options) as two:
            assert listening(process.pid) == {"127.0.0.1"}, listening(process.pid)
            blocks = [random.Random(key).randbytes(SIZE) for key in KEYS]
            for number, (key, data) in enumerate(zip(KEYS, blocks)):
                parent = KEYS[number - 1] if number else bytes(32)
                offered = Offered(key, parent, number * 16, checksum(data), 0.25, US)
                assert await one.publish(offered, memoryview(data), soon())
            got = Landing()
            await two.fetch("", SPEC, [*KEYS, bytes(32)], got, soon())
            assert got.landed_keys == KEYS
            assert [bytes(got.buffers[key]) for key in KEYS] == blocks
            assert got.offered[7] == Offered(KEYS[7], KEYS[6], 112, checksum(blocks[7]), 0.25, US)
            assert (two.stats.blocks, two.stats.bytes_in) == (40, 40 * SIZE)
            short = Landing(most=3)
            await two.fetch("", SPEC, KEYS, short, soon())
            assert short.landed_keys == KEYS[:3]
            nothing = Landing()
            await two.fetch("", SPEC, [bytes(32)], nothing, soon())
            assert nothing.landed_keys == []
            # a value whose bytes are not those that were summed
            bad = bytes([99]) * 32
            assert await one.publish(Offered(bad, bytes(32), 0, bytes(16), 0.0, US), memoryview(blocks[0]), soon())
            broken = Landing()
            try:
                await two.fetch("", SPEC, [KEYS[0], bad], broken, soon())
            except TransportFault as fault:
                assert fault.reason == "corrupt"
            else:
                raise AssertionError("it passed")
            assert broken.landed_keys == KEYS[:1]
            other = KvSpec(model="m", tokenizer="t", layout="v1", dtype="float32", block_size=16, block_bytes=SIZE * 2)
            try:
                await two.fetch("", other, KEYS, Landing(), soon())
            except TransportFault as fault:
                assert fault.reason == "nonsense"
            try:
                await two.fetch("", SPEC, KEYS, Landing(), time.monotonic())
            except TransportFault as fault:
                assert fault.reason == "late"
            assert two.stats.faults == {"corrupt": 1, "nonsense": 1, "late": 1}
            # a tenant's blocks go, also those that were read just now; another's stay
            theirs = Offered(bytes([98]) * 32, bytes(32), 0, checksum(blocks[0]), 0.0, THEM)
            assert await one.publish(theirs, memoryview(blocks[0]), soon())
            assert await two.drop_tenant(US, soon()) == len(KEYS) + 1
            assert await two.drop_tenant(US, soon()) == 0
            await two.fetch("", SPEC, KEYS, nothing, soon())
            assert nothing.landed_keys == []
            left = Landing(namespace=THEM)
            await two.fetch("", SPEC, [theirs.key], left, soon())
            assert left.landed_keys == [theirs.key]
    print("all well")

asyncio.run(main())
"""
)

STORES = (
    COMMON
    + """
from penstock.kv.client.client import BlockPut, open_store
from penstock.kv.client.origin import Origin
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import open_kvstore
from penstock.rpc.channels import open_channels

async def main():
    async with master() as (process, address), open_channels() as channels:
        def config(host):
            return KvStoreConfig(
                host_bytes=16 << 20, host_id=host, mooncake_master=address, mooncake_lend_bytes=16 << 20, bring_s=20.0)

        async with open_kvstore(config("one")) as one, open_kvstore(config("two")) as two:
            blocks = [random.Random(key).randbytes(SIZE) for key in KEYS]
            parents = [bytes(32), *KEYS]
            puts = [BlockPut(KEYS[n], parents[n], n * 16, memoryview(data)) for n, data in enumerate(blocks)]
            async with open_store(channels.to(one.address, "store"), "writer", SPEC, "one", timeout_s=20) as writer:
                assert await writer.put(puts, Origin(namespace=US)) == len(KEYS)
                async with asyncio.timeout(20):
                    while one.elsewhere.figures()["pool_published"] < len(KEYS):
                        await asyncio.sleep(0.01)
            async with open_store(channels.to(two.address, "store"), "reader", SPEC, "two", timeout_s=20) as reader:
                async with reader.lease([*KEYS, bytes(32)], Origin(namespace=US)) as leased:
                    assert [bytes(view) for view in leased.blocks] == blocks
                    assert leased.tiers == ["remote"] * len(KEYS)
                async with reader.lease(KEYS) as leased:
                    assert leased.tiers == ["host"] * len(KEYS)
            figures = two.elsewhere.figures()
            assert (figures["pool_blocks"], figures["pool_published"], figures["pulled_blocks"]) == (40, 0, 0)
            assert two.host.table.find(KEYS[5]).parent == KEYS[4]
            assert one.stats().detached == two.stats().reserved == 0
            async with open_store(channels.to(two.address, "store"), "reader", SPEC, "two", timeout_s=20) as reader:
                dropped = [await store.partitions.drop_tenant(US) for store in (one, two)]
                assert [{tier.kind.name: tier.blocks for tier in tiers} for tiers in dropped] == [
                    {"HOST": 40, "REMOTE": 40}, {"HOST": 40, "REMOTE": 0}]
                async with reader.lease(KEYS, Origin(namespace=US)) as leased:
                    assert leased.tiers == []
    print("all well")

asyncio.run(main())
"""
)

EXPOSED = (
    COMMON
    + """
async def main():
    async with master() as (process, address):
        options = MooncakeOptions(master=address, host="127.0.0.1", lend_bytes=0, buffer_bytes=16 << 20)
        try:
            async with open_mooncake_transport(options):
                raise AssertionError("it went on")
        except ConfigError as error:
            assert "every interface (outside)" in str(error), error
    print("all well")

asyncio.run(main())
"""
)


def inside(name: str, program: str) -> str:
    """What a program says that runs in a namespace of that name, and its complaints."""
    command("ip", "netns", "add", name)
    try:
        command("ip", "-n", name, "link", "set", "lo", "up")
        if program is EXPOSED:
            command("ip", "-n", name, "link", "add", "outside", "type", "veth", "peer", "name", "elsewhere")
            command("ip", "-n", name, "link", "set", "outside", "up")
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*LIBS, os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return f"{done.stdout}{done.stderr}\nended with {done.returncode}"
    finally:
        command("ip", "netns", "del", name)


@needs_mooncake
def test_a_pool_of_two_stores_moves_blocks_and_checks_them() -> None:
    said = inside(f"moon{os.getpid()}", POOL)
    assert "all well" in said, said


@needs_mooncake
def test_two_stores_share_a_pool() -> None:
    said = inside(f"moon{os.getpid()}", STORES)
    assert "all well" in said, said


@needs_mooncake
def test_a_pool_that_would_listen_on_every_interface_is_refused() -> None:
    said = inside(f"moon{os.getpid()}", EXPOSED)
    assert "all well" in said, said


def test_wildcards_are_no_addresses() -> None:
    for host in ("", "0.0.0.0", "::", "*"):
        with pytest.raises(ConfigError, match="host"):
            MooncakeOptions(master="127.0.0.1:1", host=host)


def test_what_listens_on_one_address_does_not_listen_everywhere() -> None:
    before = listening_everywhere()
    with socket.create_server(("127.0.0.1", 0)):
        assert listening_everywhere() == before
