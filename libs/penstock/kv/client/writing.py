"""Storing blocks: reserve, write, commit."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from penstock.kv.bytes.arena import ArenaMap
from penstock.kv.bytes.checksum import checksum
from penstock.kv.bytes.copying import sum_and_copy
from penstock.kv.bytes.pieces import packed
from penstock.kv.client.link import AttachStream, Link
from penstock.kv.client.loans import Loans
from penstock.kv.client.origin import Origin
from penstock.kv.identity import MAX_BATCH
from penstock.kv.parts import BlockParts
from penstock.kv.sealing import Seal, trailer_bytes
from penstock.v1 import kvstore_pb2

_BATCH_BYTES = 128 << 20
"""Reserving and committing cost the loop a millisecond or two for each of them, which copying does not hide whole."""


@dataclass(frozen=True, slots=True)
class BlockPut:
    """A block to store. `data` has its bytes as they are before they are sealed, and stays as it is until `put`
    returns."""

    key: bytes
    parent: bytes
    first_token: int
    data: memoryview
    seconds: float = 0.0
    """What computing it took; 0: unknown."""


Mine = list[tuple[BlockPut, kvstore_pb2.Reservation]]
"""Blocks with the room that they got."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks that are reserved, and not yet committed."""

    blocks: Sequence[BlockPut]
    rooms: Sequence[kvstore_pb2.Reservation]
    """One for each block."""
    mine: Mine

    @property
    def left_out(self) -> Sequence[BlockPut]:
        """Blocks from the first on that got no room: those behind it would lack their parent."""
        full = (index for index, room in enumerate(self.rooms) if room.state == kvstore_pb2.Reservation.STATE_FULL)
        return self.blocks[next(full, len(self.blocks)) :]


class Writing:
    """The writing half of a client."""

    def __init__(self, link: Link, loans: Loans) -> None:
        self._link = link
        self._loans = loans

    async def put(self, blocks: Sequence[BlockPut], origin: Origin) -> int:
        """Stores blocks in batches: one is written while the next is reserved and the one before is committed.

        A client may reserve only a part of the store: blocks without room are tried again once those before them are
        committed.

        Returns how many were stored. When it fails or is cancelled it gives back what it reserved and did not commit.
        Raises ValueError for a block that does not have the spec's size, StoreFault when the store can't help.
        """
        attachment, size = self._link.need(), self._link.content_bytes
        for block in blocks:
            if block.data.nbytes != size:
                raise ValueError(f"a block has {block.data.nbytes} bytes, the spec says {size}")
        seal = self._link.seal(origin.seal)
        batch = max(1, min(MAX_BATCH, _BATCH_BYTES // size))
        batches = [blocks[start : start + batch] for start in range(0, len(blocks), batch)]
        with attachment.using():
            return await self._put(attachment, batches, origin, seal) if batches else 0

    async def _put(
        self, attachment: AttachStream, batches: list[Sequence[BlockPut]], origin: Origin, seal: Seal | None
    ) -> int:
        unfinished: list[_Batch] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                return await self._pipeline(attachment, batches, origin, seal, tasks=tasks, unfinished=unfinished)
        except BaseExceptionGroup as group:
            self._give_back(attachment, unfinished)
            raise group.exceptions[0] from None
        except BaseException:
            self._give_back(attachment, unfinished)
            raise

    def _give_back(self, attachment: AttachStream, unfinished: list[_Batch]) -> None:
        for batch in unfinished:
            self._loans.end_reservations(attachment, [block.key for block in batch.blocks], batch.rooms)

    async def _pipeline(
        self,
        attachment: AttachStream,
        batches: list[Sequence[BlockPut]],
        origin: Origin,
        seal: Seal | None,
        *,
        tasks: asyncio.TaskGroup,
        unfinished: list[_Batch],
    ) -> int:
        """While one batch is written, the next is reserved and the one before is committed. Behind a batch that did not
        get all of its room, the rest waits for the commits; where there were none to wait for, it is left out."""
        rest = deque(batches)
        reserving: asyncio.Task[_Batch] | None = None
        committing: asyncio.Task[int] | None = None
        stored = 0
        while rest or reserving is not None:
            async with self._link.limit(attachment):
                batch = await (reserving or self._reserve(attachment, rest.popleft(), origin, unfinished))
                left_out, reserving = batch.left_out, None
                if rest and not left_out:
                    reserving = tasks.create_task(self._reserve(attachment, rest.popleft(), origin, unfinished))
                commit = await self._fill(attachment, batch.mine, seal)
                waited = committing is not None or bool(batch.mine)
                stored += await committing if committing is not None else 0
                committing = tasks.create_task(self._commit(attachment, batch, commit, unfinished))
            if left_out:
                async with self._link.limit(attachment):
                    stored += await committing
                committing = None
                if not waited:
                    break
                rest.appendleft(left_out)
        async with self._link.limit(attachment):
            return stored + (await committing if committing is not None else 0)

    async def _reserve(
        self, attachment: AttachStream, blocks: Sequence[BlockPut], origin: Origin, unfinished: list[_Batch]
    ) -> _Batch:
        link = self._link
        request = kvstore_pb2.ReserveRequest(
            attachment_id=attachment.attachment_id,
            length=link.spec.block_bytes,
            blocks=[
                kvstore_pb2.ReserveBlock(
                    key=block.key, parent=block.parent, first_token=block.first_token, seconds=block.seconds
                )
                for block in blocks
            ],
            session=origin.session,
            namespace=origin.namespace,
        )
        keys = [block.key for block in blocks]
        response = await self._loans.gain(
            attachment,
            link.rpc.Reserve,
            request,
            lambda attachment, rooms: self._loans.end_reservations(attachment, keys, rooms.blocks),
        )
        if len(response.blocks) != len(blocks):
            raise link.fault("the store's answer does not fit the question")
        mine = [
            (block, room)
            for block, room in zip(blocks, response.blocks, strict=True)
            if room.state == kvstore_pb2.Reservation.STATE_WRITE
        ]
        batch = _Batch(blocks, response.blocks, mine)
        unfinished.append(batch)
        return batch

    async def _commit(
        self, attachment: AttachStream, batch: _Batch, commit: Callable[[], Awaitable[int]], unfinished: list[_Batch]
    ) -> int:
        committed = await commit() if batch.mine else 0
        unfinished.remove(batch)
        stats = self._link.stats
        stats.put += committed
        stats.late_commits += len(batch.mine) - committed
        stats.bytes_out += committed * self._link.spec.block_bytes
        return committed

    async def _fill(self, attachment: AttachStream, mine: Mine, seal: Seal | None) -> Callable[[], Awaitable[int]]:
        """Writes blocks, or prepares them for sending; returns the call that makes them findable."""
        link, memory = self._link, attachment.memory
        size = len(mine) * link.spec.block_bytes
        if memory is None:
            sent, written = await link.work(size, lambda stop: _to_send(mine, seal, link.parts, stop))
            return lambda: self._send(attachment, sent, written)
        try:
            written = await link.work(size, lambda stop: _copy(memory, mine, seal, link.parts, stop))
        except ValueError as error:
            raise link.fault(f"the store's answer does not fit its memory: {error}") from error
        return lambda: self._finish(attachment, written)

    async def _finish(self, attachment: AttachStream, written: list[kvstore_pb2.CommitBlock]) -> int:
        request = kvstore_pb2.CommitRequest(attachment_id=attachment.attachment_id, blocks=written)
        return sum((await self._link.call(attachment, self._link.rpc.Commit, request)).committed)

    async def _send(self, attachment: AttachStream, mine: Mine, written: list[kvstore_pb2.CommitBlock]) -> int:
        async def messages() -> AsyncIterator[kvstore_pb2.BlockChunks]:
            for pieces in packed(range(len(mine)), self._link.spec.block_bytes):
                message = kvstore_pb2.BlockChunks()
                for index, at, length in pieces:
                    data = _as_bytes(mine[index][0].data)[at : at + length]
                    chunk = message.chunks.add(at=at, data=bytes(data))
                    if at == 0:
                        chunk.attachment_id = attachment.attachment_id
                        chunk.block.CopyFrom(written[index])
                yield message

        return sum((await self._link.call(attachment, self._link.rpc.Write, messages())).committed)


def _as_bytes(data: memoryview) -> memoryview:
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def _copy(
    memory: ArenaMap, mine: Mine, seal: Seal | None, parts: BlockParts | None, stop: threading.Event
) -> list[kvstore_pb2.CommitBlock]:
    """Copies blocks into their slots, sealed where there is a seal, else with their marks where they have parts. Skips
    a slot that the client no longer holds; the store refuses its commit."""
    written = []
    for block, room in mine:
        data = _as_bytes(block.data)
        if stop.is_set():
            break
        mark = b"" if parts is None or seal is not None else parts.mark(block.key, data)
        slot = memory.block(room.offset, len(data) + (len(mark) if seal is None else trailer_bytes(parts)))
        if not memory.holds(room.offset, room.epoch):
            digest = checksum(data)
        elif seal is None:
            digest = sum_and_copy(slot[: len(data)], data, mark)
            slot[len(data) :] = mark
        else:
            seal.close(block.key, data, slot)
            digest = checksum(slot)
        written.append(kvstore_pb2.CommitBlock(key=block.key, epoch=room.epoch, checksum=digest))
    return written


def _to_send(
    mine: Mine, seal: Seal | None, parts: BlockParts | None, stop: threading.Event
) -> tuple[Mine, list[kvstore_pb2.CommitBlock]]:
    """The blocks as they are sent, and what to commit afterwards; those that the stop left out are neither sealed nor
    sent."""
    sent: Mine = []
    for block, room in mine:
        if stop.is_set():
            break
        if seal is not None:
            block = replace(block, data=_seal(block, seal, trailer_bytes(parts)))
        elif parts is not None:
            block = replace(block, data=_marked(block, parts))
        sent.append((block, room))
    return sent, _checksums(sent, stop)


def _marked(block: BlockPut, parts: BlockParts) -> memoryview:
    data = _as_bytes(block.data)
    return memoryview(b"".join((data, parts.mark(block.key, data))))


def _seal(block: BlockPut, seal: Seal, behind: int) -> memoryview:
    data = _as_bytes(block.data)
    into = memoryview(bytearray(len(data) + behind))
    seal.close(block.key, data, into)
    return into


def _checksums(mine: Mine, stop: threading.Event) -> list[kvstore_pb2.CommitBlock]:
    """Computes the checksums to commit after the bytes have been sent."""
    return [
        kvstore_pb2.CommitBlock(key=block.key, epoch=room.epoch, checksum=checksum(_as_bytes(block.data)))
        for block, room in mine
        if not stop.is_set()
    ]
