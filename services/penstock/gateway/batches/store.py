"""Where files and batches are kept: what a directory and a Redis have in common."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import structlog

from penstock.gateway.batches.records import StoredBatch, StoredFile

_MOST_SAID = 1000
"""Complaints that are remembered."""
PIECE_BYTES = 1 << 18
"""Most bytes of a piece of a file."""
_ID = re.compile(r"file-[0-9a-f]{24}[ae]?|batch_[0-9a-f]{24}")


class ClaimLost(Exception):
    """Another gateway may run the batch now: nothing more may be written for it here."""


class DamagedRecord(OSError):
    """What is kept of a file or a batch can't be read; it may be of another version."""


class DamagedRecords:
    """Those that a store has left out, each of which is logged once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def leave_out(self, error: DamagedRecord) -> None:
        """There is such a record."""
        if (text := str(error)) not in self._said:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said.add(text)
            structlog.get_logger("penstock.gateway").error("a record of a batch store is left out", reason=text)


class BatchClaim(Protocol):
    """The right to run one batch. One gateway has it at a time, until the block ends in which it was given, or it is
    lost; what is written afterwards is refused."""

    batch: StoredBatch
    """As it was when the claim began."""

    async def append(self, answers: Sequence[bytes], errors: Sequence[bytes]) -> None:
        """Adds lines to the files of its results, which have them for good when this returns. Raises ClaimLost,
        OSError."""

    async def save(self, batch: StoredBatch) -> None:
        """Keeps the batch as it is now. Raises ClaimLost, OSError."""

    async def lost(self) -> None:
        """Returns when the claim is lost."""


class BatchStore(Protocol):
    """Keeps files and batches by tenant. Every method raises OSError when it can't, and has changed nothing then as far
    as anybody knows."""

    async def write(self, tenant: str, file: str, pieces: AsyncIterator[bytes]) -> None:
        """Keeps the bytes of a file, which nobody sees before `add_file`; nothing of them where `pieces` raises."""

    async def add_file(self, file: StoredFile) -> None:
        """Shows a file whose bytes are there."""

    async def files(self, tenant: str) -> list[StoredFile]:
        """All files of a tenant, in any order."""

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        """One of them."""

    def read(self, tenant: str, file: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file in pieces, whether it is shown or not; none where there is no such file."""

    async def delete_file(self, tenant: str, id: str) -> bool:
        """Deletes a file; whether there was one."""

    async def add_batch(self, batch: StoredBatch) -> None:
        """Begins a batch: somebody will find it by `open_batches`."""

    async def batches(self, tenant: str) -> list[StoredBatch]:
        """All batches of a tenant, in any order."""

    async def batch(self, tenant: str, id: str) -> StoredBatch | None:
        """One of them."""

    async def cancel(self, batch: StoredBatch, now: int) -> None:
        """Whoever runs the batch shall cancel it. The first time counts."""

    async def open_batches(self) -> list[StoredBatch]:
        """Batches of all tenants that are not over. One whose record is damaged is logged and left out."""

    def claim(self, batch: StoredBatch) -> AbstractAsyncContextManager[BatchClaim | None]:
        """The right to run a batch, for the length of the block; None: another gateway has it, or it is over."""

    async def sweep(self, now: float, kept_s: float) -> None:
        """Deletes files that have expired and that no batch reads any more, batches that have been over for
        `kept_s`, and what uploads have left that never came to their end."""


def tenant_name(tenant: str) -> str:
    """A tenant's name among those of others, as a part of a path or of a key."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def is_id(text: str) -> bool:
    """Whether a file or a batch could have this id: no other text ever becomes a part of a path."""
    return _ID.fullmatch(text) is not None
