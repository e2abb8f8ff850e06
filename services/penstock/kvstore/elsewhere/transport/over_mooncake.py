"""Blocks through a Mooncake Store: a pool of memory that hosts lend, with one master that knows what lies where.

A pool has no peers to choose among: `fetch` ignores its peer and asks the master. What others should find there has to
be put there by `publish`. Every value carries what a store needs to keep the block, and the checksum that is verified
on arrival; Mooncake verifies nothing.

Addresses are always explicit. Even so the engine of Mooncake 0.3 listens on every interface of the host, whatever
address it is given: `open_mooncake_transport` looks at the sockets that it opened, and refuses to go on unless the
network namespace has no interface but the loopback, or the options say that this is known and the ports are guarded.
Needs the extra `mooncake` and the system library libibverbs.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from penstock.kv.bytes.checksum import checksum
from penstock.kv.spec import KvSpec
from penstock.kvstore.elsewhere.transport.base import Landing, Offered, TransportFault, TransportStats
from penstock.runtime.config import ConfigError
from penstock.runtime.threads import started_threads, to_its_end

_HEAD = struct.Struct("<8s16s32s16sIdQ")
"""Magic, checksum, parent, namespace, first token, seconds, length of what follows."""
_MAGIC = b"penstkm1"
_BATCH_BYTES = 4 << 20
"""Fetched at once, and copied and checked without a pause."""
_THREADS = 2
_SETUP_S = 30.0
_LISTENING = "0A"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """How to take part in a pool."""

    master: str
    """Of the pool, host:port."""
    host: str
    """The address by which the others reach this host; never a wildcard."""
    lend_bytes: int = 64 << 20
    """Memory lent to the pool; 0 lends none."""
    buffer_bytes: int = 64 << 20
    """For what is under way."""
    any_interface: bool = False
    """It is known that Mooncake listens on every interface, and its ports are guarded."""

    def __post_init__(self) -> None:
        if self.host in ("", "0.0.0.0", "::", "*"):
            raise ConfigError("host", self.host, "an address of this host, not a wildcard")
        if ":" not in self.master:
            raise ConfigError("master", self.master, "write host:port")


class MooncakeTransport:
    """Transport. Made by `open_mooncake_transport`. Mooncake's calls block, so they run in threads of its own."""

    def __init__(self, store: Any, threads: ThreadPoolExecutor) -> None:
        self.stats = TransportStats()
        self._store = store
        self._threads = threads
        self._running: set[asyncio.Future[Any]] = set()
        self._log = structlog.get_logger("penstock.kv").bind(transport="mooncake")

    async def fetch(self, peer: str, spec: KvSpec, keys: Sequence[bytes], landing: Landing, until: float) -> None:
        """Gets the leading blocks from the pool, whichever the `peer`, and verifies each. Raises TransportFault."""
        begin = time.monotonic()
        batch = max(1, _BATCH_BYTES // spec.block_bytes)
        try:
            for start in range(0, len(keys), batch):
                names = keys[start : start + batch]
                found = await self._soon(until, partial(self._get, landing.namespace, names, spec.block_bytes))
                if self._land(found, landing) < len(names):
                    return
        except TransportFault as fault:
            self.stats.faults[fault.reason] += 1
            self._log.info("a fetch ended early", reason=str(fault))
            raise
        finally:
            self.stats.seconds += time.monotonic() - begin

    async def publish(self, block: Offered, data: memoryview, until: float) -> bool:
        """Puts a block into the pool; False: there is no room. `data` is not read after this has returned."""
        head = _HEAD.pack(
            _MAGIC, block.checksum, block.parent, block.namespace, block.first_token, block.seconds, data.nbytes
        )
        try:
            async with asyncio.timeout(max(0.001, until - time.monotonic())):
                name = _name(block.namespace, block.key)
                failed = await to_its_end(self._threads, partial(self._store.put_parts, name, head, data))
        except TimeoutError:
            return False
        return bool(failed == 0)

    async def drop_tenant(self, namespace: bytes, until: float) -> int:
        """Has all blocks of a tenant leave the pool, whoever put them there and whoever reads them: what a reader gets
        of one that is gone does not match its checksum. How many there were. Raises TransportFault."""
        pattern = f"^{re.escape(_name(namespace, b''))}"
        count: int = await self._soon(until, partial(self._store.remove_by_regex, pattern, force=True))
        if count < 0:
            raise TransportFault("broken", f"Mooncake removed no blocks: code {count}")
        return count

    def _get(self, namespace: bytes, keys: Sequence[bytes], block_bytes: int) -> list[tuple[Offered, memoryview]]:
        """The leading blocks that the pool has. In a thread."""
        found = []
        handles = self._store.batch_get_buffer([_name(namespace, key) for key in keys])
        for key, handle in zip(keys, handles, strict=True):
            if handle is None:
                break
            value = memoryview(handle).cast("B")
            if value.nbytes != _HEAD.size + block_bytes:
                raise TransportFault("nonsense", f"a value of {value.nbytes} bytes for a block of {block_bytes}")
            magic, digest, parent, namespace, first, seconds, length = _HEAD.unpack_from(value)
            if magic != _MAGIC or length != block_bytes:
                raise TransportFault("nonsense", "a value that is not a block")
            offered = Offered(key, parent, first, digest, seconds, namespace if any(namespace) else b"")
            found.append((offered, value[_HEAD.size :]))
        return found

    def _land(self, found: list[tuple[Offered, memoryview]], landing: Landing) -> int:
        views = landing.room([offered for offered, _ in found])
        try:
            for (offered, data), view in zip(found, views, strict=False):
                if view is None:
                    continue
                view[:] = data
                self.stats.bytes_in += data.nbytes
                if checksum(view) != offered.checksum:
                    raise TransportFault("corrupt", "a block did not match its checksum")
                view.release()
                self.stats.blocks += 1
                landing.landed(offered)
        finally:
            for view in (*views, *(data for _, data in found)):
                if view is not None:
                    view.release()
        return len(views)

    def _start(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """Runs a call in a thread. The future must not be cancelled: it stands for the thread."""
        running = asyncio.wrap_future(self._threads.submit(job))
        self._running.add(running)
        running.add_done_callback(self._ended)
        return running

    def _ended(self, done: asyncio.Future[Any]) -> None:
        self._running.discard(done)
        done.exception()  # whoever waited for it has seen it

    async def close(self) -> None:
        """Leaves the pool, once no call is under way any more: Mooncake does not survive the contrary."""
        while self._running:
            await asyncio.wait(self._running)
        await asyncio.get_running_loop().run_in_executor(self._threads, self._store.close)

    async def _soon(self, until: float, job: Callable[[], Result]) -> Result:
        """Runs a blocking call. Gives up waiting at `until`; the call itself can't be stopped."""
        running = self._start(job)
        try:
            async with asyncio.timeout(max(0.001, until - time.monotonic())):
                return await asyncio.shield(running)
        except TimeoutError:
            raise TransportFault("late", "the pool did not answer in time") from None
        except TransportFault:
            raise
        except Exception as error:
            raise TransportFault("broken", f"Mooncake failed: {error}") from error


@asynccontextmanager
async def open_mooncake_transport(options: MooncakeOptions) -> AsyncIterator[MooncakeTransport]:
    """Joins a pool for the length of the block.

    Raises ConfigError when Mooncake is not installed, can't reach its master, or listens where it should not.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError("mooncake", str(error), "pip install penstock[mooncake], and install libibverbs") from None
    loop = asyncio.get_running_loop()
    with started_threads(_THREADS, "penstock-mooncake") as threads:
        store = MooncakeDistributedStore()
        before = listening_everywhere()
        async with asyncio.timeout(_SETUP_S):
            failed = await loop.run_in_executor(threads, lambda: store.setup(_settings(options)))
        transport = MooncakeTransport(store, threads)
        try:
            if failed:
                raise ConfigError("master", options.master, f"Mooncake could not join the pool there: code {failed}")
            _check_listening(options, listening_everywhere() - before)
            yield transport
        finally:
            await transport.close()


def _settings(options: MooncakeOptions) -> dict[str, str]:
    return {
        "local_hostname": f"{options.host}:{_free_port(options.host)}",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(options.lend_bytes),
        "local_buffer_size": str(options.buffer_bytes),
        "protocol": "tcp",
        "master_server_addr": options.master,
    }


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def _check_listening(options: MooncakeOptions, ports: set[int]) -> None:
    exposed = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    if ports and exposed and not options.any_interface:
        raise ConfigError(
            "any_interface",
            False,
            f"Mooncake listens on every interface ({', '.join(exposed)}), ports {', '.join(map(str, sorted(ports)))};"
            " run it in a network namespace of its own, or guard the ports and set this to true",
        )


def _is_up(name: str) -> bool:
    try:
        return bool(int(Path("/sys/class/net", name, "flags").read_text(), 16) & 1)
    except (OSError, ValueError):
        return True


def listening_everywhere() -> set[int]:
    """Ports on which this process accepts TCP connections from every interface."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was the one that listed them
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                if words[3] == _LISTENING and not address.strip("0") and f"socket:[{words[9]}]" in mine:
                    ports.add(int(port, 16))
    return ports


def _name(namespace: bytes, key: bytes) -> str:
    """Of a block; with the tenant in it, so that all of a tenant's can be removed."""
    return f"penstock/{namespace.hex() or 'unknown'}/{key.hex()}"
