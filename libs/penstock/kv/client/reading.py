"""Reading blocks: pin, copy, check the copy, give the pin back.

The client checks the copy: whatever happens to the store's memory meanwhile (a pin that lapses, a writer that comes
far too late), bytes that are not those that were stored never pass. Sealed blocks are opened as they are copied, which
is their check. Where the far part of a block is enough, its mark is: see penstock.kv.parts.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import grpc

from penstock.kv.bytes import bulk
from penstock.kv.bytes.arena import ArenaMap
from penstock.kv.bytes.checksum import CHECKSUM_BYTES, checksum
from penstock.kv.bytes.copying import copy_and_sum, copy_bytes
from penstock.kv.bytes.pieces import Assembly, split
from penstock.kv.client.link import AttachStream, Link, StoreFault
from penstock.kv.client.loans import Loans
from penstock.kv.client.origin import Origin
from penstock.kv.device.mapped import OnDevice
from penstock.kv.identity import MAX_KEYS
from penstock.kv.parts import BlockParts
from penstock.kv.sealing import Seal
from penstock.v1 import common_pb2, kvstore_pb2

_TIERS = {
    common_pb2.TIER_GPU: "gpu",
    common_pb2.TIER_HOST: "host",
    common_pb2.TIER_NVME: "nvme",
    common_pb2.TIER_REMOTE: "remote",
}


@dataclass(frozen=True, slots=True)
class _Refs:
    """The stored prefix of some keys: an entry of each list per block."""

    lease_id: int = 0
    offsets: Sequence[int] = ()
    epochs: Sequence[int] = ()
    tiers: Sequence[str] = ()
    checksums: Sequence[bytes] = ()

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(slots=True, eq=False)
class Leased:
    """The leading stored blocks, pinned until the `lease` block is left.

    The views are read-only; they lie in the store's memory, or in buffers of this object when it could not be
    mapped. Copy, then ask `still_valid`, or have each copied and checked by `copy`, which sealed blocks need: their
    views are sealed. Do not keep the views.
    """

    blocks: list[memoryview] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    """Where each of `blocks` was: "gpu", "host", "nvme" or "remote"."""
    _refs: _Refs = field(default_factory=_Refs)
    _memory: ArenaMap | None = None
    _good: int = 0
    """Leading blocks that passed."""
    _bad: int | None = None
    """The first that did not."""
    more: bool = False
    """The time ended while more was on its way to the store: asking again for the rest brings it."""
    on_device: OnDevice = field(default_factory=OnDevice)
    """The blocks before `blocks`, when they are read on the device. `copy` is for the others only."""
    _whole: list[memoryview] = field(default_factory=list)
    """As `blocks`, with what a seal has added to them."""
    far: int = 0
    """The leading ones of `blocks` of which only the far part is read; their other bytes are undefined."""
    _keys: Sequence[bytes] = ()
    _seal: Seal | None = None
    _parts: BlockParts | None = None

    def still_valid(self) -> bool:
        """False: a pin has lapsed and a slot changed hands, so discard the copies.

        Exact, not a guess by the clock: the slots' epochs lie in the mapped memory. Received buffers stay valid.
        """
        memory, refs = self._memory, self._refs
        if not self.on_device.still_valid():
            return False
        return memory is None or all(map(memory.holds, refs.offsets[: len(self.blocks)], refs.epochs))

    def _still_holds(self, index: int) -> bool:
        refs = self._refs
        return self._memory is None or self._memory.holds(refs.offsets[index], refs.epochs[index])

    def copy(self, index: int, into: memoryview) -> bool:
        """Copies block `index`, or its far part where that is enough; False when it is not as it was stored. Needs no
        `still_valid`. From any thread, in order.

        A block that fails is taken out of service when the lease ends.
        """
        return self._judged(index, self._copied(index, into))

    def _copied(self, index: int, into: memoryview) -> bool:
        whole = self._whole[index]
        if index < self.far and self._seal is not None:
            return self._seal.open_far(self._keys[index], whole, into) and self._still_holds(index)
        if index < self.far and self._parts is not None:
            self._parts.copy(into, whole)
            if self._memory is None:
                return True
            # The mark lies in the slot itself, so this has to be the block's still.
            mark = self._parts.mark(self._keys[index], into)
            return mark == whole[self._parts.block_bytes :] and self._still_holds(index)
        if self._seal is not None:
            # It may look at a byte twice: once for the tag, once for the text. So the slot has to be the block's still.
            return self._seal.open(self._keys[index], whole, into) and self._still_holds(index)
        if self._memory is None:  # checked when it came
            copy_bytes(into, whole[: into.nbytes])
            return True
        behind = bytes(whole[into.nbytes :])
        return copy_and_sum(into, whole[: into.nbytes], behind) == self._refs.checksums[index]

    def intact(self, index: int) -> bool:
        """Whether block `index` lies there as it was stored, as far as can be told without opening it."""
        if self._memory is None:
            return self._judged(index, True)
        if index < self.far and self._parts is not None and self._seal is None:
            marked = self._parts.marked(self._keys[index], self._whole[index])
            return self._judged(index, marked and self._still_holds(index))
        return self._judged(index, checksum(self._whole[index]) == self._refs.checksums[index])

    def _judged(self, index: int, good: bool) -> bool:
        if good:
            self._good = max(self._good, index + 1)
        else:
            self._bad = index
        return good


def whole_blocks(found: int) -> int:
    """Of these blocks, how many are read without their near parts: none."""
    return 0


class Reading:
    """The reading half of a client."""

    def __init__(self, link: Link, loans: Loans) -> None:
        self._link = link
        self._loans = loans

    @asynccontextmanager
    async def lease(
        self,
        keys: Sequence[bytes],
        origin: Origin,
        checked: bool,
        on_device: bool = False,
        *,
        wait_s: float = 0.0,
        far: Callable[[int], int] = whole_blocks,
    ) -> AsyncIterator[Leased]:
        """Pins the leading stored blocks while the caller is inside, and gives them back in the background.

        `far` says, when so many were found, of how many leading ones the far part is enough.

        On the store's host the blocks are views of its memory, elsewhere they are received into new buffers. All of
        them become invalid when the lease ends. Raises StoreFault.
        """
        attachment, seal = self._link.need(), self._link.seal(origin.seal)
        if not keys:
            yield Leased()
            return
        with attachment.using():
            leased, response = Leased(), kvstore_pb2.LeaseResponse()
            try:
                async with self._link.limit(attachment) as until:
                    mappable = on_device and attachment.on_device is not None
                    response = await self._pin(attachment, keys, origin, mappable, wait_s)
                    there = self._on_device(attachment, keys, response)
                    keys = keys[len(there.views) :]
                    refs = self._refs(keys, response)
                    readable = self._link.parts is not None and (attachment.memory is not None or attachment.ranges)
                    enough = far(len(there.views) + len(refs)) - len(there.views) if readable else 0
                    enough = min(max(0, enough), len(refs))
                    leased = await self._load(attachment, keys, refs, until, seal=seal, far=enough)
                    leased.on_device, leased.more = there, response.more
                    if checked and leased.blocks:
                        await self._check_all(attachment, keys, leased)
                yield leased
                if leased._bad is not None:
                    await self._bad_block(attachment, keys, leased._refs, leased._bad)
            finally:
                self._count(leased._good, leased.far)
                self._link.stats.on_device += len(leased.on_device.views)
                leased.on_device.views.clear()
                for view in (*leased.blocks, *leased._whole):
                    with suppress(BufferError):  # the caller kept a view of it
                        view.release()
                self._loans.end_lease(attachment, response)

    async def fetch(self, keys: Sequence[bytes], into: Sequence[memoryview], origin: Origin) -> list[str]:
        """Copies the leading stored blocks into the caller's buffers and checks each copy, under a lease that it ends.

        Returns the tier of each block that was copied and is right. Raises StoreFault, and ValueError for a buffer that
        is read-only, not of format B, or not of a block's size.
        """
        attachment, size = self._link.need(), self._link.content_bytes
        seal = self._link.seal(origin.seal)
        for buffer in into:
            if buffer.nbytes != size or buffer.format != "B" or buffer.readonly:
                raise ValueError(f"a buffer has {buffer.nbytes} bytes; {size} writable ones of format B are needed")
        keys = keys[: len(into)]
        if not keys:
            return []
        with attachment.using():
            response = kvstore_pb2.LeaseResponse()
            try:
                async with self._link.limit(attachment) as until:
                    response = await self._pin(attachment, keys, origin)
                    refs = self._refs(keys, response)
                    good = await self._copy(attachment, keys, refs, into, until=until, seal=seal)
            finally:
                self._loans.end_lease(attachment, response)
        self._count(good)
        return list(refs.tiers[:good])

    def _count(self, good: int, far: int = 0) -> None:
        stats, far = self._link.stats, min(far, good)
        stats.fetched += good
        stats.far += far
        stats.bytes_in += far * sum(end - begin for begin, end in self._link.far_pieces)
        stats.bytes_in += (good - far) * self._link.spec.block_bytes

    async def _pin(
        self,
        attachment: AttachStream,
        keys: Sequence[bytes],
        origin: Origin,
        on_device: bool = False,
        wait_s: float = 0.0,
    ) -> kvstore_pb2.LeaseResponse:
        request = kvstore_pb2.LeaseRequest(
            attachment_id=attachment.attachment_id,
            keys=keys[:MAX_KEYS],
            session=origin.session,
            sources=origin.sources,
            namespace=origin.namespace,
            on_device=on_device,
            wait_s=wait_s,
        )
        response: kvstore_pb2.LeaseResponse = await self._loans.gain(
            attachment, self._link.rpc.Lease, request, self._loans.end_lease
        )
        return response

    def _on_device(
        self, attachment: AttachStream, keys: Sequence[bytes], response: kvstore_pb2.LeaseResponse
    ) -> OnDevice:
        try:
            return OnDevice.of(attachment.on_device, response.device, len(keys))
        except ValueError as error:
            raise self._link.fault(f"the store's answer does not fit the question: {error}") from error

    def _refs(self, keys: Sequence[bytes], response: kvstore_pb2.LeaseResponse) -> _Refs:
        if not response.lease_id:
            return _Refs()
        refs = _Refs(
            response.lease_id,
            list(response.offsets),
            list(response.epochs),
            [_TIERS.get(tier, "host") for tier in response.tiers],
            split(response.checksums, CHECKSUM_BYTES) if len(response.checksums) % CHECKSUM_BYTES == 0 else (),
        )
        counts = {len(refs.offsets), len(refs.epochs), len(refs.tiers), len(refs.checksums)}
        if len(counts) != 1 or len(refs) > len(keys) or response.length != self._link.spec.block_bytes:
            raise self._link.fault("the store's answer does not fit the question")
        return refs

    # -- into views

    async def _load(
        self,
        attachment: AttachStream,
        keys: Sequence[bytes],
        refs: _Refs,
        until: float,
        *,
        seal: Seal | None,
        far: int = 0,
    ) -> Leased:
        memory, link = attachment.memory, self._link
        whole = (
            await self._receive(attachment, keys, refs, self._buffers(refs), until=until, far=far)
            if memory is None
            else self._views(memory, refs)
        )
        views = [view[: link.content_bytes].toreadonly() for view in whole]
        return Leased(
            views,
            list(refs.tiers[: len(views)]),
            refs,
            memory,
            far=far,
            _whole=whole,
            _keys=keys,
            _seal=seal,
            _parts=link.parts,
        )

    def _buffers(self, refs: _Refs) -> Iterator[memoryview]:
        return (memoryview(bytearray(self._link.spec.block_bytes)) for _ in range(len(refs)))

    def _views(self, memory: ArenaMap, refs: _Refs) -> list[memoryview]:
        size = self._link.spec.block_bytes
        try:
            return [memory.block(offset, size) for offset in refs.offsets]
        except ValueError as error:
            raise self._link.fault(f"the store's answer does not fit its memory: {error}") from error

    async def _check_all(self, attachment: AttachStream, keys: Sequence[bytes], leased: Leased) -> None:
        size = len(leased.blocks) * self._link.spec.block_bytes
        await self._link.work(size, partial(_check_views, leased))
        if leased._bad is not None:
            await self._bad_block(attachment, keys, leased._refs, leased._bad)
            leased._bad = None
        del leased.blocks[leased._good :], leased.tiers[leased._good :]

    # -- into buffers of the caller

    async def _copy(
        self,
        attachment: AttachStream,
        keys: Sequence[bytes],
        refs: _Refs,
        into: Sequence[memoryview],
        *,
        until: float,
        seal: Seal | None,
    ) -> int:
        if attachment.memory is None and seal is None and self._link.parts is None:
            return len(await self._receive(attachment, keys, refs, into, until=until))
        leased = await self._load(attachment, keys, refs, until, seal=seal)
        size = len(leased.blocks) * self._link.spec.block_bytes
        await self._link.work(size, partial(_copy_all, leased, into))
        if leased._bad is not None:
            await self._bad_block(attachment, keys, refs, leased._bad)
        return leased._good

    async def _receive(
        self,
        attachment: AttachStream,
        keys: Sequence[bytes],
        refs: _Refs,
        into: Iterable[memoryview],
        *,
        until: float,
        far: int = 0,
    ) -> list[memoryview]:
        """Streams the blocks, of the first `far` the far part; returns the buffers of those that arrive as they should,
        well before the time limit."""
        buffers, good = iter(into), list[memoryview]()
        if far:
            good = await self._stream(attachment, keys, refs, buffers, range(far), until=until, far=True)
        if far < len(refs) and len(good) == far:
            good += await self._stream(attachment, keys, refs, buffers, range(far, len(refs)), until=until)
        return good

    async def _stream(
        self,
        attachment: AttachStream,
        keys: Sequence[bytes],
        refs: _Refs,
        into: Iterator[memoryview],
        indices: range,
        *,
        until: float,
        far: bool = False,
    ) -> list[memoryview]:
        """As `_receive`, of some consecutive blocks, or the far part of each."""
        wanted = self._link.far_pieces if far else None
        assembly, good = Assembly(into, self._link.spec.block_bytes, wanted), 0
        call = self._link.read(
            kvstore_pb2.ReadRequest(
                attachment_id=attachment.attachment_id,
                lease_id=refs.lease_id,
                indices=indices,
                ranges=[kvstore_pb2.BlockRange(begin=begin, end=end) for begin, end in wanted or ()],
            ),
            until,
        )
        try:
            async for message in call:
                for buffer in assembly.add(*bulk.decode(message)):
                    index = indices[good]
                    if not self._arrived(keys[index], buffer, None if far else refs.checksums[index]):
                        await self._bad_block(attachment, keys, refs, index)
                        return assembly.whole[:good]
                    good += 1
        except ValueError as error:
            raise self._link.fault(f"the store's answer does not fit the question: {error}") from error
        except grpc.aio.AioRpcError as error:
            if not good and not indices.start:
                raise self._link.failed(attachment, error, of_lease=True) from error
        finally:
            call.cancel()
        return assembly.whole

    def _arrived(self, key: bytes, block: memoryview, digest: bytes | None) -> bool:
        """Whether a block, or without a checksum its far part, is as it was stored. A far part that is sealed shows it
        when it is opened."""
        if digest is not None:
            return checksum(block) == digest
        return self._link.seals or (self._link.parts is not None and self._link.parts.marked(key, block))

    # -- when the bytes are wrong

    async def _bad_block(self, attachment: AttachStream, keys: Sequence[bytes], refs: _Refs, index: int) -> None:
        memory, epoch = attachment.memory, refs.epochs[index]
        if memory is not None and not memory.holds(refs.offsets[index], epoch):
            self._link.stats.lapsed += 1
            return
        self._link.stats.mismatches += 1
        self._link.log.warning("a block did not match its checksum", key=keys[index].hex()[:16], index=index)
        with suppress(StoreFault):
            await self.quarantine(attachment, keys[index], epoch)

    async def quarantine(self, attachment: AttachStream, key: bytes, epoch: int) -> bool:
        """Has the store take a block out of service; False: it was not, or no longer, that block. Raises StoreFault."""
        request = kvstore_pb2.QuarantineRequest(attachment_id=attachment.attachment_id, key=key, epoch=epoch)
        removed: bool = (await self._link.call(attachment, self._link.rpc.Quarantine, request)).removed
        return removed


def _check_views(leased: Leased, stop: threading.Event) -> None:
    for index in range(len(leased.blocks)):
        if stop.is_set() or not leased.intact(index):
            return


def _copy_all(leased: Leased, into: Sequence[memoryview], stop: threading.Event) -> None:
    for index, (_, target) in enumerate(zip(leased.blocks, into, strict=False)):
        if stop.is_set() or not leased.copy(index, target):
            return
