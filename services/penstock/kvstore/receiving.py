"""Blocks that arrive in chunks, for clients that can't map the arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import xxhash

from penstock.errors import InvalidRequest
from penstock.kvstore.store import Store
from penstock.kvstore.table.blocks import Written


class BlockReceiver:
    """Receives the blocks of one Write call one after the other, and commits each that is whole and right."""

    def __init__(self, store_of: Callable[[str], Store]) -> None:
        """`store_of` finds the store of an attachment."""
        self._store_of = store_of
        self._attachment = ""
        self._block: Written | None = None
        self._at = 0
        self._sum = xxhash.xxh3_128()
        self._lost = False
        self._committed: list[bool] = []

    def begin(self, attachment_id: str, block: Written) -> None:
        """The next block; the one before must be complete."""
        self._check_complete()
        self._attachment, self._block = attachment_id, block
        self._at, self._lost = 0, False
        self._sum.reset()

    def add(self, at: int, data: bytes) -> None:
        """Adds the next bytes of the block, or drops them when the attachment no longer owns the reservation."""
        block = self._block
        if block is None:
            raise InvalidRequest("a chunk before its block", field="block")
        store = self._store_of(self._attachment)
        length = store.host.table.block_bytes
        if at != self._at or at + len(data) > length:
            raise InvalidRequest(
                f"{len(data)} bytes at {at}, expected at {self._at} of {length}; chunks come in order", field="at"
            )
        found = store.host.table.puts.find(self._attachment, block.key, block.epoch, store.now())
        if found is None:
            self._lost = True
        else:
            store.host.view(found)[at : at + len(data)] = data
            self._sum.update(data)
        self._at += len(data)
        if self._at == length:
            self._commit(block)

    def _commit(self, block: Written) -> None:
        store = self._store_of(self._attachment)
        whole = not self._lost and self._sum.digest() == block.checksum
        answer = store.host.table.puts.commit(
            self._attachment, [block if whole else replace(block, checksum=b"")], store.now()
        )
        self._committed.append(whole and answer[0])
        self._block = None

    def finish(self) -> list[bool]:
        """One answer per block: whether it is stored."""
        self._check_complete()
        return self._committed

    def _check_complete(self) -> None:
        if self._block is not None:
            raise InvalidRequest(f"the block ends after {self._at} bytes", field="data")
