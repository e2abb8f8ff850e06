"""The lending part of a client: the store finds blocks in the client's own memory, and copies what others want."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from penstock.kv.bytes.arena import Arena
from penstock.kv.client.link import AttachStream, Link
from penstock.kv.client.origin import NOBODY, Origin
from penstock.kv.identity import MAX_BATCH
from penstock.kv.parts import MARK_BYTES, BlockParts
from penstock.v1 import kvstore_pb2


@dataclass(frozen=True, slots=True)
class Vouched:
    """What a client says of a block's bytes."""

    checksum: bytes
    """Of the block."""
    behind: bytes
    """Its mark, where blocks have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoan:
    """A block in a page of the client. Before anybody writes to the page the client ends its epoch in the arena."""

    key: bytes
    parent: bytes
    first_token: int
    seconds: float
    """What computing it took; 0: unknown."""
    page: int
    epoch: int
    """Names this holding of the page; never used twice."""
    checksum: bytes
    behind: bytes = b""
    """As in Vouched."""
    origin: Origin = NOBODY


class Lending:
    """The loans of a client."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def vouch(self, blocks: Sequence[tuple[bytes, memoryview]]) -> list[Vouched]:
        """For each block, by its key and bytes."""
        size = len(blocks) * self._link.spec.block_bytes
        return await self._link.work(size, lambda stop: _vouched(blocks, self._link.parts, stop))

    async def open(self, pages: Arena) -> str:
        """Shows the pages to the store; why it can't or won't use them, empty when it does. Raises StoreFault."""
        attachment, layout = self._link.need(), pages.layout
        if attachment.memory is None:
            return "the store shares no memory with this worker"
        there = kvstore_pb2.ClientPages(
            path=pages.path,
            bytes=pages.size,
            id=pages.arena_id,
            epochs_at=layout.epochs_at,
            slots_at=layout.slots_at,
            slot_stride=layout.stride,
            slots=layout.slots,
            behind=0 if self._link.parts is None else MARK_BYTES,
        )
        return await self._lend(attachment, kvstore_pb2.LendRequest(pages=there))

    async def lend(self, loans: Sequence[BlockLoan], pages: Arena, ended: Sequence[bytes] = ()) -> None:
        """Tells of blocks that can be had from `pages`, which the attachment has opened, and of those that cannot any
        more. Raises StoreFault."""
        attachment, layout = self._link.need(), pages.layout
        for start in range(0, len(ended), MAX_BATCH):
            keys = b"".join(ended[start : start + MAX_BATCH])
            await self._lend(attachment, kvstore_pb2.LendRequest(ended=keys))
        for batch in _batches(loans):
            request = kvstore_pb2.LendRequest(session=batch[0].origin.session, namespace=batch[0].origin.namespace)
            for loan in batch:
                request.blocks.add(
                    key=loan.key,
                    parent=loan.parent,
                    first_token=loan.first_token,
                    seconds=loan.seconds,
                    offset=layout.offset(loan.page),
                    epoch=loan.epoch,
                    checksum=loan.checksum,
                    behind=loan.behind,
                )
            await self._lend(attachment, request)

    async def save(self, keys: Sequence[bytes]) -> int:
        """Has the store copy lent blocks; returns how many it has then. Raises StoreFault."""
        attachment = self._link.need()
        request = kvstore_pb2.SaveRequest(attachment_id=attachment.attachment_id, keys=b"".join(keys[:MAX_BATCH]))
        saved: int = (await self._link.call(attachment, self._link.rpc.Save, request)).saved
        return saved

    async def _lend(self, attachment: AttachStream, request: kvstore_pb2.LendRequest) -> str:
        request.attachment_id = attachment.attachment_id
        refused: str = (await self._link.call(attachment, self._link.rpc.Lend, request)).refused
        return refused


def _vouched(
    blocks: Sequence[tuple[bytes, memoryview]], parts: BlockParts | None, stop: threading.Event
) -> list[Vouched]:
    return [_vouch(key, block, parts) for key, block in blocks if not stop.is_set()]


def _vouch(key: bytes, block: memoryview, parts: BlockParts | None) -> Vouched:
    mark = b"" if parts is None else parts.mark(key, block)
    digest = xxhash.xxh3_128(block)
    digest.update(mark)
    return Vouched(digest.digest(), mark)


def _batches(loans: Sequence[BlockLoan]) -> list[list[BlockLoan]]:
    """In messages of one origin each."""
    batches: list[list[BlockLoan]] = []
    for loan in loans:
        if not batches or batches[-1][0].origin != loan.origin or len(batches[-1]) == MAX_BATCH:
            batches.append([])
        batches[-1].append(loan)
    return batches
