"""Files and batches in a directory: they outlast the gateways, and all gateways of a host that use it share them.

A record is a small file of JSON that is replaced as a whole; the bytes of a file lie beside its record. What is shown
to anybody is on the disk by then. `open/` has an empty file for each batch that is not over: who holds its lock runs
the batch, and the kernel gives the lock back when the process ends, however it ends.

    open/TENANT.BATCH
    TENANT/files/FILE.json, FILE.data, FILE.part while it arrives
    TENANT/batches/BATCH.json, BATCH.cancel
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from penstock.gateway.batches.journal import LineJournal
from penstock.gateway.batches.records import StoredBatch, StoredFile
from penstock.gateway.batches.store import PIECE_BYTES, BatchClaim, DamagedRecord, DamagedRecords, tenant_name
from penstock.runtime.config import ConfigError
from penstock.runtime.disk import age_s, closing, lock_file, rename_file, replace_file, settle, write_all
from penstock.runtime.private import open_directory
from penstock.runtime.threads import started_threads, to_its_end

Value = TypeVar("Value")
Record = TypeVar("Record", StoredFile, StoredBatch)
_RECORDS: dict[type[StoredFile | StoredBatch], msgspec.json.Decoder[StoredFile | StoredBatch]] = {
    kind: msgspec.json.Decoder(kind) for kind in (StoredFile, StoredBatch)
}
"""Made here, in one thread: msgspec 0.22 has crashed where two were the first to decode a type."""
_THREADS = 4
_ABANDONED_S = 86_400.0
"""An upload that has not come to its end by then never will; nor will a batch whose record is missing."""


class DirectoryBatches:
    """Made by `open_directory_batches`."""

    def __init__(self, root: Path, threads: ThreadPoolExecutor) -> None:
        self._root = root
        self._damaged = DamagedRecords()
        self._threads = threads

    async def write(self, tenant: str, file: str, pieces: AsyncIterator[bytes]) -> None:
        """Keeps the bytes of a file."""
        path = self._files(tenant) / f"{file}.part"
        opened: list[int] = []

        def begin() -> None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

        try:
            with closing(opened):
                await self._run(begin)
                async for piece in pieces:
                    await self._run(partial(write_all, opened[0], piece))
                await self._run(lambda: os.fsync(opened[0]))
            await self._run(lambda: rename_file(path, path.with_suffix(".data")))
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    async def add_file(self, file: StoredFile) -> None:
        """Shows a file."""
        path = self._files(file.tenant) / f"{file.id}.json"
        await self._run(lambda: _put(path, file))

    async def files(self, tenant: str) -> list[StoredFile]:
        """All files of a tenant."""
        return await self._run(lambda: list(_all(self._files(tenant), StoredFile)))

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        """One of them."""
        return await self._run(lambda: _get(self._files(tenant) / f"{id}.json", StoredFile))

    async def read(self, tenant: str, file: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file in pieces."""
        path = self._files(tenant) / f"{file}.data"
        opened: list[int] = []

        def begin() -> None:
            with suppress(FileNotFoundError):
                opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

        with closing(opened):
            await self._run(begin)
            while opened and (piece := await self._run(lambda: os.read(opened[0], PIECE_BYTES))):
                yield piece

    async def delete_file(self, tenant: str, id: str) -> bool:
        """Deletes a file; its record goes first."""

        def delete() -> bool:
            path = self._files(tenant) / f"{id}.json"
            if not path.exists():
                return False
            path.unlink(missing_ok=True)
            path.with_suffix(".data").unlink(missing_ok=True)
            settle(path.parent)
            return True

        return await self._run(delete)

    async def add_batch(self, batch: StoredBatch) -> None:
        """Begins a batch. Its mark comes before its record: a record without a mark would never be run."""

        def add() -> None:
            mark, record = self._mark(batch), self._batch(batch)
            for path in (mark, record):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            settle(mark.parent)
            _put(record, batch)

        await self._run(add)

    async def batches(self, tenant: str) -> list[StoredBatch]:
        """All batches of a tenant."""
        directory = self._root / tenant_name(tenant) / "batches"
        return await self._run(lambda: [self._now(batch) for batch in _all(directory, StoredBatch)])

    async def batch(self, tenant: str, id: str) -> StoredBatch | None:
        """One of them."""
        return await self._run(lambda: self._known(tenant_name(tenant), id))

    async def cancel(self, batch: StoredBatch, now: int) -> None:
        """Whoever runs the batch shall cancel it."""

        def mark() -> None:
            path = self._batch(batch).with_suffix(".cancel")
            if not path.exists():
                replace_file(path, str(now).encode())

        await self._run(mark)

    async def open_batches(self) -> list[StoredBatch]:
        """Batches of all tenants that are not over."""
        return await self._run(lambda: list(self._open()))

    @asynccontextmanager
    async def claim(self, batch: StoredBatch) -> AsyncIterator[BatchClaim | None]:
        """The right to run a batch."""
        opened: list[int] = []
        with closing(opened):  # which gives the lock back
            locked = await self._run(lambda: lock_file(self._mark(batch), opened))
            # What was known before the lock may be old.
            found = await self._run(lambda: self._known(tenant_name(batch.tenant), batch.id)) if locked else None
            if found is None or found.over:
                yield None
                return
            claim = _DirectoryClaim(self, found)
            try:
                await self._run(claim.open)
                yield claim
            finally:
                await self._run(claim.close)

    async def sweep(self, now: float, kept_s: float) -> None:
        """Deletes what is kept no longer."""
        await self._run(lambda: self._sweep(now, kept_s))

    async def _run(self, work: Callable[[], Value]) -> Value:
        return await to_its_end(self._threads, work)

    # In a thread

    def _open(self) -> Iterator[StoredBatch]:
        for mark in sorted((self._root / "open").iterdir()):
            tenant, _, id = mark.name.partition(".")
            try:
                batch = self._known(tenant, id)
            except DamagedRecord as error:
                self._damaged.leave_out(error)
                continue
            if batch is not None and not batch.over:
                yield batch
            elif batch is not None or age_s(mark) > _ABANDONED_S:
                mark.unlink(missing_ok=True)

    def _known(self, tenant: str, id: str) -> StoredBatch | None:
        found = _get(self._root / tenant / "batches" / f"{id}.json", StoredBatch)
        return found and self._now(found)

    def _now(self, batch: StoredBatch) -> StoredBatch:
        """A batch as its record says, and as others wish."""
        if batch.over:
            return batch
        path = self._batch(batch).with_suffix(".cancel")
        try:
            return batch.cancelling(int(path.read_text()))
        except FileNotFoundError:
            return batch
        except ValueError:
            raise DamagedRecord(f"{path} does not hold a time") from None

    def save(self, batch: StoredBatch) -> None:
        """Keeps a batch as its claim has it."""
        _put(self._batch(batch), batch)
        if batch.over:
            self._mark(batch).unlink(missing_ok=True)

    def _sweep(self, now: float, kept_s: float) -> None:
        unfinished = list(self._open())
        results = {batch.results(ok) for batch in unfinished for ok in (True, False)}
        inputs = {batch.input_file_id for batch in unfinished}
        for directory in self._root.iterdir():
            if directory.name == "open" or not directory.is_dir():
                continue
            try:
                files, batches = (
                    list(_all(directory / "files", StoredFile)),
                    [self._now(batch) for batch in _all(directory / "batches", StoredBatch)],
                )
            except DamagedRecord as error:  # which may need what others do not
                self._damaged.leave_out(error)
                continue
            for file in files:
                if file.expires_at <= now and file.id not in inputs:
                    (directory / "files" / f"{file.id}.json").unlink(missing_ok=True)
                    (directory / "files" / f"{file.id}.data").unlink(missing_ok=True)
            kept = results | {file.id for file in files}
            for path in (directory / "files").glob("*"):
                abandoned = path.suffix in (".part", ".data", ".new") and path.stem not in kept
                if abandoned and age_s(path) > _ABANDONED_S:
                    path.unlink(missing_ok=True)
            for batch in batches:
                if batch.over and batch.over_at + kept_s <= now:
                    for suffix in (".cancel", ".json"):
                        self._batch(batch).with_suffix(suffix).unlink(missing_ok=True)

    def _files(self, tenant: str) -> Path:
        return self._root / tenant_name(tenant) / "files"

    def _batch(self, batch: StoredBatch) -> Path:
        return self._root / tenant_name(batch.tenant) / "batches" / f"{batch.id}.json"

    def _mark(self, batch: StoredBatch) -> Path:
        return self._root / "open" / f"{tenant_name(batch.tenant)}.{batch.id}"

    def results(self, batch: StoredBatch, ok: bool) -> Path:
        """Where the lines of its answers are, or of its errors."""
        return self._files(batch.tenant) / f"{batch.results(ok)}.data"


class _DirectoryClaim:
    """Holds the lock of a batch."""

    def __init__(self, store: DirectoryBatches, batch: StoredBatch) -> None:
        self.batch = batch
        self._store = store
        self._answers, self._errors = (LineJournal(store.results(batch, ok)) for ok in (True, False))

    def open(self) -> None:
        """In a thread: takes away what a crash has left of a line that was being written."""
        self._answers.open()
        self._errors.open()

    def close(self) -> None:
        """In a thread."""
        self._answers.close()
        self._errors.close()

    async def append(self, answers: Sequence[bytes], errors: Sequence[bytes]) -> None:
        """Adds lines to the files of its results."""

        def add() -> None:
            self._answers.append(answers)
            self._errors.append(errors)

        await self._store._run(add)

    async def save(self, batch: StoredBatch) -> None:
        """Keeps the batch as it is now."""
        await self._store._run(lambda: self._store.save(batch))
        self.batch = batch

    async def lost(self) -> None:
        """Never: a lock ends with its process."""
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def open_directory_batches(root: Path) -> AsyncIterator[DirectoryBatches]:
    """The store in a directory, which is made where it is missing. Raises ConfigError."""
    root = _made(root)
    with started_threads(_THREADS, "batches") as threads:
        yield DirectoryBatches(root, threads)


def _made(root: Path) -> Path:
    root = root.expanduser().absolute()
    try:
        os.close(open_directory(root))
        (root / "open").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        right = f"must be a directory of this user alone, or redis://...: {error.strerror}"
        raise ConfigError("batch_store", str(root), right) from None
    return root


def _all(directory: Path, kind: type[Record]) -> Iterator[Record]:
    if directory.is_dir():
        for path in directory.glob("*.json"):
            if (found := _get(path, kind)) is not None:
                yield found


def _get(path: Path, kind: type[Record]) -> Record | None:
    with suppress(FileNotFoundError):
        try:
            return cast("Record", _RECORDS[kind].decode(path.read_bytes()))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedRecord(f"{path} is no record of a {kind.__name__}: {error}") from None
    return None


def _put(path: Path, record: StoredFile | StoredBatch) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, msgspec.json.encode(record))
