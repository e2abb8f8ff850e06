"""What clients may do with files of their own tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from penstock.errors import InvalidRequest, NotFound, Overloaded, Refused, TooLarge, Unavailable
from penstock.gateway.api.openai.batch_bodies import MOST_KEPT_S, check_kept
from penstock.gateway.batches.form import FileForm
from penstock.gateway.batches.pages import page_of
from penstock.gateway.batches.records import Clock, Json, StoredFile, new_file_id, new_order
from penstock.gateway.batches.store import BatchStore, is_id
from penstock.runtime.config import format_size

_MOST_LISTED = 10_000
_AT_ONCE, _TENANTS_AT_ONCE = 8, 2
"""Uploads at one time: of all, and of one tenant."""
_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBounds:
    """How much is kept."""

    bytes: int
    """Of one file."""
    tenant_bytes: int
    """Of all files of a tenant."""
    tenant_files: int
    kept_s: float
    """For which a file is kept, unless its client says less."""


@contextmanager
def reachable() -> Iterator[None]:
    """Raises Unavailable in place of an error of the store."""
    try:
        yield
    except OSError as error:
        structlog.get_logger("penstock.gateway").error("files and batches can't be reached", reason=str(error))
        what = "files and batches can't be reached now; try again"
        raise Unavailable(what, code="store_unavailable", retry_after=1) from None


class FileDesk:
    """Files of all tenants; each sees its own alone."""

    def __init__(self, store: BatchStore, bounds: FileBounds, clock: Clock) -> None:
        self._store = store
        self._bounds = bounds
        self._clock = clock
        self._arriving: Counter[str] = Counter()
        """Uploads by tenant."""
        self._bytes: Counter[str] = Counter()
        """Of them so far."""

    async def upload(self, tenant: str, form: FileForm, body: AsyncIterator[bytes]) -> StoredFile:
        """Keeps the file of a form. Raises InvalidRequest, TooLarge, Refused, Overloaded and Unavailable; then nothing
        of it is kept."""
        if self._arriving.total() >= _AT_ONCE or self._arriving[tenant] >= _TENANTS_AT_ONCE:
            raise Overloaded("too many files are arriving; try again later", code="overloaded", retry_after=1)
        with self._arrives(tenant) as grow, reachable():
            taken = await self.room(tenant, 1)
            id, size = new_file_id(), 0

            async def bounded() -> AsyncIterator[bytes]:
                nonlocal size
                async for piece in form.pieces(body):
                    if not size and "purpose" in form.fields:
                        _check_purpose(form.fields)
                    size += len(piece)
                    self._check_size(size, taken + grow(len(piece)))
                    yield piece
                self._check_form(form, size)
                self._check_size(size, await self.room(tenant, 1) + grow(0))  # others have ended meanwhile

            await self._store.write(tenant, id, bounded())
            now = int(self._clock())
            file = StoredFile(
                id=id,
                tenant=tenant,
                name=form.filename or "file",
                purpose="batch",
                bytes=size,
                created_at=now,
                expires_at=now + self._kept_s(form.fields),
                order=new_order(),
            )
            await self._store.add_file(file)
            return file

    async def room(self, tenant: str, files: int = 0) -> int:
        """Bytes of a tenant's files. Raises Refused when it may not have so many more, because what its batches have
        made counts too, and Unavailable."""
        with reachable():
            known = await self._store.files(tenant)
        taken, bounds = sum(file.bytes for file in known), self._bounds
        if len(known) + files > bounds.tenant_files:
            what = f"{len(known)} files are kept for this account, which may have {bounds.tenant_files}; delete some"
            raise Refused(what, code="too_many_files")
        if taken > bounds.tenant_bytes:
            most = format_size(bounds.tenant_bytes)
            what = f"the files of this account have {format_size(taken)}, and may have {most} together; delete some"
            raise Refused(what, code="too_many_bytes")
        return taken

    async def page(self, tenant: str, query: Mapping[str, str]) -> Json:
        """A page of the list. Raises InvalidRequest."""
        with reachable():
            found = [file for file in await self._store.files(tenant) if self._kept(file)]
        if (purpose := query.get("purpose")) is not None:
            found = [file for file in found if file.purpose == purpose]
        return page_of(found, query, _MOST_LISTED, _MOST_LISTED)

    async def find(self, tenant: str, id: str) -> StoredFile:
        """One file. Raises NotFound."""
        with reachable():
            found = await self._store.file(tenant, id) if is_id(id) else None
        if found is None or not self._kept(found):
            raise NotFound(f"there is no file {id[:_SHOWN]!r}", field="file_id", code="file_not_found")
        return found

    def read(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Its bytes, in pieces. Raises OSError."""
        return self._store.read(file.tenant, file.id)

    async def delete(self, tenant: str, id: str) -> Json:
        """Deletes a file. Raises NotFound, and Refused as long as a batch needs it."""
        await self.find(tenant, id)
        with reachable():
            for batch in await self._store.batches(tenant):
                if batch.input_file_id == id and not batch.over:
                    raise Refused(f"the batch {batch.id} reads this file; cancel it first", code="file_in_use")
            await self._store.delete_file(tenant, id)
        return {"id": id, "object": "file", "deleted": True}

    @contextmanager
    def _arrives(self, tenant: str) -> Iterator[Callable[[int], int]]:
        """What it gives is told of each piece, and says how many bytes of the tenant's uploads have arrived."""
        self._arriving[tenant] += 1
        own = 0

        def grow(size: int) -> int:
            nonlocal own
            own += size
            self._bytes[tenant] += size
            return self._bytes[tenant]

        try:
            yield grow
        finally:
            self._arriving[tenant] -= 1
            self._bytes[tenant] -= own
            if not self._arriving[tenant]:
                del self._arriving[tenant], self._bytes[tenant]

    def _kept(self, file: StoredFile) -> bool:
        return file.expires_at > self._clock()

    def _check_size(self, size: int, together: int) -> None:
        if size > self._bounds.bytes:
            what = f"file: is longer than {format_size(self._bounds.bytes)}, which is the most; divide it"
            raise TooLarge(what, field="file", code="file_too_large")
        if together > self._bounds.tenant_bytes:
            most = format_size(self._bounds.tenant_bytes)
            what = f"file: with it the files of this account would have more than {most} together; delete some"
            raise TooLarge(what, field="file", code="too_many_bytes")

    def _check_form(self, form: FileForm, size: int) -> None:
        _check_purpose(form.fields)
        self._kept_s(form.fields)
        if not size:
            raise InvalidRequest("file: is empty", field="file")

    def _kept_s(self, fields: Mapping[str, str]) -> int:
        """For which the file is kept. Raises InvalidRequest."""
        usual = int(self._bounds.kept_s)
        anchor, said = fields.get("expires_after[anchor]", "created_at"), fields.get("expires_after[seconds]")
        if anchor != "created_at":
            right = f"expires_after[anchor]: must be created_at, not {anchor[:40]!r}"
            raise InvalidRequest(right, field="expires_after[anchor]")
        if said is None:
            return usual
        field = "expires_after[seconds]"
        if not said.isascii() or not said.isdigit():
            raise InvalidRequest(f"{field}: must be a number of seconds, not {said[:40]!r}", field=field)
        check_kept(field, int(said[:12]))
        return min(int(said), max(usual, 0), MOST_KEPT_S)


def _check_purpose(fields: Mapping[str, str]) -> None:
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest('purpose: is required; it must be "batch"', field="purpose")
    if purpose != "batch":
        right = f'purpose: must be "batch", not {purpose[:40]!r}: files are for the input of batches here'
        raise InvalidRequest(right, field="purpose", code="unsupported_purpose")
