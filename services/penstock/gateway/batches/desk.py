"""What clients may do with batches of their own tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.errors import InvalidRequest, NotFound, Refused
from penstock.gateway.api.openai.batch_bodies import BatchBody
from penstock.gateway.batches.files import FileDesk, reachable
from penstock.gateway.batches.pages import page_of
from penstock.gateway.batches.records import Clock, Json, StoredBatch, new_batch_id, new_order
from penstock.gateway.batches.store import BatchStore, is_id

_MOST_LISTED, _USUALLY_LISTED = 100, 20
_MOST_KEPT = 10_000
"""Batches of a tenant, with those that are over."""
_SHOWN = 100


class BatchDesk:
    """Batches of all tenants; each sees its own alone."""

    def __init__(
        self, store: BatchStore, files: FileDesk, clock: Clock, *, most: int, stir: Callable[[], object]
    ) -> None:
        """A tenant has at most `most` that are not over. `stir` is called when there is something to do."""
        self.files = files
        self._store = store
        self._clock = clock
        self._most = most
        self._stir = stir

    async def begin(self, tenant: str, body: BatchBody) -> StoredBatch:
        """Begins a batch. Raises InvalidRequest, NotFound, Refused and Unavailable."""
        body.check()
        window_s = body.window_s()
        file = await self.files.find(tenant, body.input_file_id)
        if file.purpose != "batch":
            right = f"input_file_id: must be a file with the purpose batch, not {file.purpose}"
            raise InvalidRequest(right, field="input_file_id")
        now = int(self._clock())
        batch = StoredBatch(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            results_kept_s=body.output_expires_after.seconds if body.output_expires_after else None,
            created_at=now,
            expires_at=now + window_s,
            order=new_order(),
        )
        await self.files.room(tenant)
        with reachable():
            known = await self._store.batches(tenant)
            unfinished = sum(not found.over for found in known)
            if unfinished >= self._most:
                what = f"{unfinished} batches of this account are not over, which is all that it may have; wait for one"
                raise Refused(what, code="too_many_batches")
            if len(known) >= _MOST_KEPT:
                what = (
                    f"{len(known)} batches of this account are kept, which is all that it may have; they go with time"
                )
                raise Refused(what, code="too_many_batches")
            await self._store.add_batch(batch)
        self._stir()
        return batch

    async def page(self, tenant: str, query: Mapping[str, str]) -> Json:
        """A page of the list. Raises InvalidRequest."""
        with reachable():
            found = await self._store.batches(tenant)
        return page_of(found, query, _MOST_LISTED, _USUALLY_LISTED)

    async def find(self, tenant: str, id: str) -> StoredBatch:
        """One batch. Raises NotFound."""
        with reachable():
            found = await self._store.batch(tenant, id) if is_id(id) else None
        if found is None:
            raise NotFound(f"there is no batch {id[:_SHOWN]!r}", field="batch_id", code="batch_not_found")
        return found

    async def cancel(self, tenant: str, id: str) -> StoredBatch:
        """Has a batch cancelled. Raises NotFound, and Refused when it is over, or nearly."""
        found = await self.find(tenant, id)
        if found.status not in ("validating", "in_progress", "cancelling"):
            raise Refused(f"the batch {id} is {found.status} and can't be cancelled any more", code="batch_over")
        now = int(self._clock())
        with reachable():
            await self._store.cancel(found, now)
        self._stir()
        return found.cancelling(found.cancelling_at or now)
