"""The client of a KV store: what the workers use. See `open_store`.

The store is an optimisation, never an authority. Whatever goes wrong is a `StoreFault` or a shorter answer, within
the time limit; a store that is away costs a caller microseconds, and is found again in the background.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import structlog

from penstock.kv.arena import ArenaMap, Layout, MapError
from penstock.kv.checksum import checksum
from penstock.kv.copying import copy_bytes
from penstock.kv.identity import MAX_KEYS, KvSpec
from penstock.kv.pieces import Assembly, packed
from penstock.rpc.context import outgoing
from penstock.rpc.convert import spec_to_message
from penstock.rpc.errors import Unavailable, from_rpc
from penstock.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

"""Keys in one question."""
_INLINE_BYTES = 1 << 20
"""Copying and checking less than this is done on the event loop; it takes well under a millisecond."""
_THREADS = 2
"""So that a read is not behind a large put."""
_BATCH_BLOCKS = 4096
_BATCH_BYTES = 64 << 20
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_TIERS = {
    common_pb2.TIER_GPU: "gpu",
    common_pb2.TIER_HOST: "host",
    common_pb2.TIER_NVME: "nvme",
    common_pb2.TIER_REMOTE: "remote",
}
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.CANCELLED,
)

Result = TypeVar("Result")


class StoreFault(Unavailable):
    """The store can't help now: compute instead."""


@dataclass(frozen=True, slots=True)
class BlockPut:
    """A block to store. `data` has the spec's block_bytes and stays unchanged until `put` returns."""

    key: bytes
    parent: bytes
    first_token: int
    data: memoryview
    seconds: float = 0.0
    """What computing it took; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """For whom blocks are stored or fetched. The store learns from it what is worth keeping."""

    conversation: str = ""
    """Digest of the conversation; empty: unknown."""
    namespace: bytes = b""
    """Of the tenant, NAMESPACE_BYTES long; empty: unknown."""


NOBODY = Origin()


@dataclass(slots=True)
class ClientStats:
    """Counters since the start; blocks unless named otherwise."""

    fetched: int = 0
    put: int = 0
    bytes_in: int = 0
    """Read from the store."""
    bytes_out: int = 0
    """Written to the store."""
    mismatches: int = 0
    """Blocks whose bytes did not match their checksum."""
    late_commits: int = 0
    """Written, but the reservation was over."""
    lapsed: int = 0
    """Leases that ended before their reader did."""
    faults: int = 0
    """Calls that ended in a StoreFault, fast ones while disconnected included."""
    attached: int = 0
    """Sessions opened."""
    mapped: int = 0
    """Sessions with the store's memory mapped."""


@dataclass(slots=True, eq=False)
class _Session:
    """One Attach stream."""

    session_id: str
    memory: ArenaMap | None
    call: Any
    over: bool = False
    users: int = 0

    def end(self) -> None:
        """Cancels the stream. The memory is unmapped when nobody uses it any more."""
        if not self.over:
            self.over = True
            self.call.cancel()
            self._unmap()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keeps the memory mapped for the length of the block."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self._unmap()

    def _unmap(self) -> None:
        if self.over and self.users == 0 and self.memory is not None:
            self.memory.close()
            self.memory = None


@dataclass(slots=True, eq=False)
class Leased:
    """The leading stored blocks, pinned until the `lease` block is left.

    The views are read-only and hold checked bytes; they lie in the store's memory, or in buffers of this object
    when it could not be mapped. Copy, then ask `still_valid`. Do not keep the views.
    """

    blocks: list[memoryview] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    """Where each block was: "gpu", "host", "nvme" or "remote"."""
    _refs: Sequence[kvstore_pb2.BlockRef] = ()
    _memory: ArenaMap | None = None

    def still_valid(self) -> bool:
        """False: a pin has lapsed and a slot changed hands, discard what was copied.

        Exact, not a guess by the clock: the slots' epochs lie in the mapped memory. Received buffers stay valid.
        """
        memory = self._memory
        return memory is None or all(memory.holds(ref.offset, ref.epoch) for ref in self._refs[: len(self.blocks)])


class StoreClient:
    """One client of one store. Made by `open_store`; used from its event loop.

    Every method raises StoreFault, at the latest after the time limit, when the store can't help.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | None,
        client: str,
        spec: KvSpec,
        host_id: str,
        timeout_s: float,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.stats = ClientStats()
        self.reason = "no store is configured" if channel is None else "not attached yet"
        """Why the store is not connected, for people."""
        self._stub = kvstore_pb2_grpc.KvStoreStub(channel) if channel is not None else None
        self._client = client
        self._spec = spec
        self._host_id = host_id
        self._timeout_s = timeout_s
        self._threads = threads
        self._session: _Session | None = None
        self._attempted = asyncio.Event()
        self._returns: list[tuple[_Session, int]] = []
        self._unwritten: list[tuple[_Session, kvstore_pb2.CommitBlock]] = []
        self._tidy_up = asyncio.Event()
        self._strays: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("penstock.kv").bind(client=client)

    @property
    def connected(self) -> bool:
        """Whether a call would reach the store, as far as is known."""
        return self._session is not None

    # -- what callers do

    async def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored."""
        session = self._need()
        if not keys:
            return 0
        request = kvstore_pb2.LookupRequest(keys=keys[:MAX_KEYS])
        found: int = (await self._call(session, self._rpc.Lookup, request)).found
        return found

    @asynccontextmanager
    async def lease(self, keys: Sequence[bytes], origin: Origin = NOBODY) -> AsyncIterator[Leased]:
        """Pins and checks the leading stored blocks, in one round trip. A block that fails its check ends the prefix.

        Leaving the block gives the pins back without waiting.
        """
        session = self._need()
        if not keys:
            yield Leased()
            return
        request = kvstore_pb2.LeaseRequest(
            session_id=session.session_id, keys=keys[:MAX_KEYS], conversation=origin.conversation
        )
        with session.using():
            leased, response = Leased(), kvstore_pb2.LeaseResponse()
            try:
                async with self._limit(session) as until:
                    response = await self._gain(session, self._rpc.Lease, request, self._end_lease)
                    if response.blocks:
                        leased = await self._load(session, keys, response, until)
                yield leased
            finally:
                for view in leased.blocks:
                    with suppress(BufferError):  # somebody kept a view of it
                        view.release()
                self._end_lease(session, response)

    async def put(self, blocks: Sequence[BlockPut], origin: Origin = NOBODY) -> int:
        """Stores blocks that are not stored yet; returns how many were. Parents come before their children.

        The time limit holds for each 64 MiB. Cancelling is safe: when it returns, nothing reads `data` any more.
        """
        session = self._need()
        for block in blocks:
            if block.data.nbytes != self._spec.block_bytes:
                raise ValueError(f"a block has {block.data.nbytes} bytes, the spec says {self._spec.block_bytes}")
        stored, batch = 0, max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // self._spec.block_bytes))
        with session.using():
            for start in range(0, len(blocks), batch):
                async with self._limit(session):
                    stored += await self._put(session, blocks[start : start + batch], origin)
        return stored

    async def quarantine(self, key: bytes, epoch: int) -> bool:
        """Has a block taken out of service; False: it was not, or no longer, that block."""
        session = self._need()
        request = kvstore_pb2.QuarantineRequest(session_id=session.session_id, key=key, epoch=epoch)
        removed: bool = (await self._call(session, self._rpc.Quarantine, request)).removed
        return removed

    # -- reading

    async def _load(
        self, session: _Session, keys: Sequence[bytes], response: kvstore_pb2.LeaseResponse, until: float
    ) -> Leased:
        refs = response.blocks
        if len(refs) > len(keys) or any(ref.length != self._spec.block_bytes for ref in refs):
            raise self._fault("the store's answer does not fit the question")
        if session.memory is not None:
            views = self._views(session.memory, refs)
        else:
            views = [view.toreadonly() for view in await self._receive(session, response, until)]
        good = await self._work(sum(view.nbytes for view in views), lambda stop: _count_good(views, refs, stop))
        leased = Leased(views[:good], [_TIERS.get(ref.tier, "host") for ref in refs[:good]], refs, session.memory)
        if good < len(views):
            await self._bad_block(session, leased, keys[good], refs[good])
        self.stats.fetched += good
        self.stats.bytes_in += sum(view.nbytes for view in leased.blocks)
        return leased

    def _views(self, memory: ArenaMap, refs: Sequence[kvstore_pb2.BlockRef]) -> list[memoryview]:
        try:
            return [memory.block(ref.offset, ref.length).toreadonly() for ref in refs]
        except ValueError as error:
            raise self._fault(f"the store's answer does not fit its memory: {error}") from error

    async def _bad_block(self, session: _Session, leased: Leased, key: bytes, ref: kvstore_pb2.BlockRef) -> None:
        if session.memory is not None and not session.memory.holds(ref.offset, ref.epoch):
            self.stats.lapsed += 1
            return
        self.stats.mismatches += 1
        self._log.warning("a block did not match its checksum", key=key.hex()[:16], index=len(leased.blocks))
        with suppress(StoreFault):
            await self.quarantine(key, ref.epoch)

    async def _receive(self, session: _Session, response: kvstore_pb2.LeaseResponse, until: float) -> list[memoryview]:
        """The bytes of the leading blocks that arrive whole, well before the time limit."""
        count = len(response.blocks)
        assembly = Assembly(count, self._spec.block_bytes)
        request = kvstore_pb2.ReadRequest(
            session_id=session.session_id, lease_id=response.lease_id, indices=range(count)
        )
        remaining = max(0.001, (until - time.monotonic()) * 0.9)
        call = self._rpc.Read(request, timeout=remaining, metadata=outgoing())
        try:
            async for message in call:
                for chunk in message.chunks:
                    assembly.add(chunk.index, chunk.at, chunk.data)
        except ValueError as error:
            raise self._fault(f"the store's answer does not fit the question: {error}") from error
        except grpc.aio.AioRpcError as error:
            if not assembly.whole:
                raise self._failed(session, error) from error
        finally:
            call.cancel()
        return assembly.whole

    # -- writing

    async def _put(self, session: _Session, blocks: Sequence[BlockPut], origin: Origin) -> int:
        request = kvstore_pb2.ReserveRequest(
            session_id=session.session_id,
            length=self._spec.block_bytes,
            blocks=[
                kvstore_pb2.ReserveBlock(
                    key=block.key, parent=block.parent, first_token=block.first_token, seconds=block.seconds
                )
                for block in blocks
            ],
            conversation=origin.conversation,
            namespace=origin.namespace,
        )
        keys = [block.key for block in blocks]
        response = await self._gain(
            session, self._rpc.Reserve, request, lambda session, rooms: self._give_back(session, keys, rooms.blocks)
        )
        if len(response.blocks) != len(blocks):
            raise self._fault("the store's answer does not fit the question")
        mine = [
            (block, room)
            for block, room in zip(blocks, response.blocks, strict=True)
            if room.state == kvstore_pb2.Reservation.STATE_WRITE
        ]
        if not mine:
            return 0
        try:
            committed = await self._fill(session, mine)
        except BaseException:
            self._give_back(session, keys, response.blocks)
            raise
        self.stats.put += committed
        self.stats.late_commits += len(mine) - committed
        self.stats.bytes_out += committed * self._spec.block_bytes
        return committed

    async def _fill(self, session: _Session, mine: list[tuple[BlockPut, kvstore_pb2.Reservation]]) -> int:
        memory, size = session.memory, len(mine) * self._spec.block_bytes
        if memory is None:
            written = await self._work(size, lambda stop: _checksums(mine, stop))
            return await self._send(session, mine, written)
        try:
            written = await self._work(size, lambda stop: _copy(memory, mine, stop))
        except ValueError as error:
            raise self._fault(f"the store's answer does not fit its memory: {error}") from error
        request = kvstore_pb2.CommitRequest(session_id=session.session_id, blocks=written)
        return sum((await self._call(session, self._rpc.Commit, request)).committed)

    async def _send(
        self,
        session: _Session,
        mine: list[tuple[BlockPut, kvstore_pb2.Reservation]],
        written: list[kvstore_pb2.CommitBlock],
    ) -> int:
        async def messages() -> AsyncIterator[kvstore_pb2.BlockChunks]:
            for pieces in packed(range(len(mine)), self._spec.block_bytes):
                message = kvstore_pb2.BlockChunks()
                for index, at, length in pieces:
                    data = _as_bytes(mine[index][0].data)[at : at + length]
                    chunk = message.chunks.add(index=index, at=at, data=bytes(data))
                    if at == 0:
                        chunk.session_id = session.session_id
                        chunk.block.CopyFrom(written[index])
                yield message

        return sum((await self._call(session, self._rpc.Write, messages())).committed)

    # -- giving back

    def _end_lease(self, session: _Session, response: kvstore_pb2.LeaseResponse) -> None:
        if response.lease_id:
            self._returns.append((session, response.lease_id))
            self._tidy_up.set()

    def _give_back(self, session: _Session, keys: Sequence[bytes], rooms: Sequence[kvstore_pb2.Reservation]) -> None:
        for key, room in zip(keys, rooms, strict=False):
            if room.state == kvstore_pb2.Reservation.STATE_WRITE:
                self._unwritten.append((session, kvstore_pb2.CommitBlock(key=key, epoch=room.epoch)))
        self._tidy_up.set()

    async def _gain(
        self, session: _Session, method: Any, request: Any, give_back: Callable[[_Session, Any], None]
    ) -> Any:
        """A call that brings a loan. When its caller is cancelled it goes on alone, to give back what it brings."""
        calling = asyncio.ensure_future(self._call(session, method, request))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            self._strays.add(calling)
            calling.add_done_callback(lambda done: self._came_too_late(session, done, give_back))
            raise

    def _came_too_late(
        self, session: _Session, done: asyncio.Task[Any], give_back: Callable[[_Session, Any], None]
    ) -> None:
        self._strays.discard(done)
        if not done.cancelled() and done.exception() is None:
            give_back(session, done.result())

    # -- calls and faults

    @property
    def _rpc(self) -> Any:
        return self._stub

    def _need(self) -> _Session:
        if self._session is None:
            raise self._fault(f"the store is not connected: {self.reason}")
        return self._session

    def _fault(self, message: str) -> StoreFault:
        self.stats.faults += 1
        return StoreFault(message)

    async def _call(self, session: _Session, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s, metadata=outgoing())
        except grpc.aio.AioRpcError as error:
            raise self._failed(session, error) from error

    @asynccontextmanager
    async def _limit(self, session: _Session) -> AsyncIterator[float]:
        """Ends the block after the time limit; the value is the time of that."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield time.monotonic() + self._timeout_s
        except TimeoutError as error:
            self._lost(session, "the store does not answer")
            raise self._fault("the store did not answer in time") from error

    def _failed(self, session: _Session, error: grpc.aio.AioRpcError) -> StoreFault:
        """Also ends the session when the store seems to be gone, so that the next caller does not wait as long."""
        if error.code() in _GONE and from_rpc(error).field != "lease_id":
            self._lost(session, error.details() or error.code().name)
        return self._fault(f"the store failed: {error.details()}")

    def _lost(self, session: _Session, reason: str) -> None:
        if self._session is session:
            self._session = None
            self.reason = reason
            self._log.info("store lost", reason=reason)
        session.end()

    async def _work(self, size: int, job: Callable[[threading.Event], Result]) -> Result:
        """Runs a job over `size` bytes, in a thread when it would hold up the event loop.

        When cancelled it returns only after the thread has stopped touching memory, which takes one block.
        """
        stop = threading.Event()
        if size <= _INLINE_BYTES:
            return job(stop)
        submitted = self._threads.submit(job, stop)
        running = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            while not submitted.cancel() and not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    # -- in the background

    async def first_attempt(self) -> None:
        """Returns when the first attempt to attach has succeeded or failed, at the latest after the time limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._attempted.wait()

    async def stay_attached(self) -> None:
        """Attaches, and attaches again whenever the session ends, with growing pauses, until cancelled."""
        pause = _FIRST_PAUSE_S
        while self._stub is not None:
            reason, attached = await self._one_session()
            if not attached and reason != self.reason:
                self._log.info("store not connected", reason=reason)
            self.reason = reason
            self._attempted.set()
            pause = _FIRST_PAUSE_S if attached else min(_LONGEST_PAUSE_S, pause * 2)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        self._attempted.set()

    async def _one_session(self) -> tuple[str, bool]:
        """Returns why the session ended, and whether there was one."""
        request = kvstore_pb2.AttachRequest(client=self._client, spec=spec_to_message(self._spec))
        call = self._rpc.Attach(request)
        session: _Session | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                first = await call.read()
            if first is grpc.aio.EOF:
                return "the store ended the session", False
            session = self._session = self._begin(first, call)
            self.reason = ""
            self._attempted.set()
            await call.read()
            return "the store ended the session", True
        except TimeoutError:
            return "the store does not answer", False
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name, session is not None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if session is None or not session.over or (task is not None and task.cancelling()):
                raise
            return self.reason, True  # the call was cancelled, not this task: see _lost
        finally:
            call.cancel()
            if session is not None:
                self._lost(session, "the store ended the session")

    def _begin(self, first: kvstore_pb2.AttachResponse, call: Any) -> _Session:
        memory = self._map(first)
        self.stats.attached += 1
        self.stats.mapped += memory is not None
        self._log.info("attached to the store", mapped=memory is not None)
        return _Session(first.session_id, memory, call)

    def _map(self, first: kvstore_pb2.AttachResponse) -> ArenaMap | None:
        if first.host_id != self._host_id or not first.arena_path:
            return None
        layout = Layout(first.slots, first.slots_at, first.slot_stride, first.epochs_at)
        try:
            return ArenaMap(first.arena_path, first.arena_bytes, first.arena_id, layout)
        except MapError as error:
            self._log.warning("streaming from the store of this host", reason=str(error))
            return None

    async def tidy(self) -> None:
        """Gives leases and reservations back that callers are done with, until cancelled."""
        while True:
            await self._tidy_up.wait()
            self._tidy_up.clear()
            returns, self._returns = self._returns, []
            unwritten, self._unwritten = self._unwritten, []
            session = self._session
            if session is None:
                continue  # the store took everything back with the session
            leases = [lease_id for owner, lease_id in returns if owner is session]
            blocks = [block for owner, block in unwritten if owner is session]
            with suppress(StoreFault):
                if leases:
                    request = kvstore_pb2.ReleaseRequest(session_id=session.session_id, lease_ids=leases)
                    released = (await self._call(session, self._rpc.Release, request)).released
                    self.stats.lapsed += len(released) - sum(released)
                if blocks:
                    commit = kvstore_pb2.CommitRequest(session_id=session.session_id, blocks=blocks)
                    await self._call(session, self._rpc.Commit, commit)

    def close(self) -> None:
        """Ends the session; the store takes back what is left."""
        for stray in list(self._strays):
            stray.cancel()
        if self._session is not None:
            self._lost(self._session, "closed")


@asynccontextmanager
async def open_store(
    channel: grpc.aio.Channel | None, client: str, spec: KvSpec, host_id: str, *, timeout_s: float = 2.0
) -> AsyncIterator[StoreClient]:
    """A client of the store behind `channel`, for blocks of `spec`; without a channel it is never connected.

    `client` is a name for the store's log. When the store has the same `host_id` its memory is mapped, else bytes
    are streamed. No call takes longer than `timeout_s`. Opens also when there is no store yet: it is looked for in
    the background, and again after it was lost.
    """
    with ThreadPoolExecutor(_THREADS, "penstock-kv") as threads:
        store = StoreClient(channel, client, spec, host_id, timeout_s, threads)
        tasks = [asyncio.create_task(store.stay_attached()), asyncio.create_task(store.tidy())]  # awaited below
        try:
            await store.first_attempt()
            yield store
        finally:
            store.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _as_bytes(data: memoryview) -> memoryview:
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def _count_good(views: list[memoryview], refs: Sequence[kvstore_pb2.BlockRef], stop: threading.Event) -> int:
    """How many leading views match their checksums."""
    for index, (view, ref) in enumerate(zip(views, refs, strict=False)):
        if stop.is_set() or checksum(view) != ref.checksum:
            return index
    return len(views)


def _copy(
    memory: ArenaMap, mine: list[tuple[BlockPut, kvstore_pb2.Reservation]], stop: threading.Event
) -> list[kvstore_pb2.CommitBlock]:
    """Copies blocks into their slots. A slot that is no longer ours is left alone; its commit will be refused."""
    written = []
    for block, room in mine:
        data = _as_bytes(block.data)
        if stop.is_set():
            break
        slot = memory.block(room.offset, len(data))
        if memory.holds(room.offset, room.epoch):
            copy_bytes(slot, data)
        written.append(kvstore_pb2.CommitBlock(key=block.key, epoch=room.epoch, checksum=checksum(data)))
    return written


def _checksums(
    mine: list[tuple[BlockPut, kvstore_pb2.Reservation]], stop: threading.Event
) -> list[kvstore_pb2.CommitBlock]:
    """What to commit when the bytes are sent."""
    return [
        kvstore_pb2.CommitBlock(key=block.key, epoch=room.epoch, checksum=checksum(_as_bytes(block.data)))
        for block, room in mine
        if not stop.is_set()
    ]
