"""Pins on blocks, for clients that read them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from penstock.errors import NotFound
from penstock.kvstore.table.attachments import Attachments
from penstock.kvstore.table.blocks import Attachment, Lease, TierKind
from penstock.kvstore.table.clock import Deadlines, Wake
from penstock.kvstore.table.shelf import Shelf


class Leases:
    """All leases of one table; `expire` is the table's."""

    def __init__(self, shelf: Shelf, attachments: Attachments, *, expire: Callable[[float], None], wake: Wake) -> None:
        self.hits = self.misses = self.expired = 0
        self._shelf = shelf
        self._attachments = attachments
        self._expire_all = expire
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)
        self._ends: Deadlines[int] = Deadlines(wake)

    def __len__(self) -> int:
        return len(self._leases)

    def take(
        self,
        attachment_id: str,
        keys: Sequence[bytes],
        seconds: float,
        now: float,
        session: str = "",
        *,
        grows: bool = False,
    ) -> Lease | None:
        """Pins the leading stored blocks for at most `seconds`; None when the first is not stored.

        A lease that `grows` is given also when nothing is found yet; `extend` it, and `settle` it at the end.
        """
        self._expire_all(now)
        attachment = self._attachments.of(attachment_id)
        blocks = self._shelf.leading(keys)
        self.hits += len(blocks)
        if not grows:
            self.misses += len(keys) - len(blocks)
            if not blocks:
                return None
        self._shelf.pin_used(blocks, session, now)
        lease = Lease(next(self._ids), attachment_id, blocks, now + seconds, session)
        attachment.leases[lease.lease_id] = self._leases[lease.lease_id] = lease
        self._ends.add(lease.deadline, lease.lease_id)
        return lease

    def extend(self, lease: Lease, keys: Sequence[bytes], kind: TierKind, now: float) -> int:
        """Pins those of `keys` that follow the lease's blocks and are stored by now; returns how many.

        `kind` says where they were before. Nothing happens to a lease that is over.
        """
        self._expire_all(now)
        if lease.lease_id not in self._leases:
            return 0
        first = at = len(lease.blocks)
        while at < len(keys) and (block := self._shelf.find(keys[at])) is not None:
            self._shelf.pin_used([block], lease.session, now)
            lease.blocks.append(block)
            at += 1
        self.hits += at - first
        if kind is not TierKind.HOST:
            lease.brought.update(dict.fromkeys(range(first, at), kind))
        return at - first

    def settle(self, lease: Lease, asked: int, now: float) -> Lease | None:
        """Ends the growth of a lease that was to have `asked` blocks. None: nothing was found, or it is over."""
        self._expire_all(now)
        self.misses += asked - len(lease.blocks)
        if lease.lease_id not in self._leases:
            return None
        if not lease.blocks:
            self.abandon(lease, now)
            return None
        return lease

    def abandon(self, lease: Lease, now: float) -> None:
        """Gives a lease back that no client will be told of; it may be over."""
        if lease.lease_id in self._leases:
            self._release(self._attachments.of(lease.attachment), lease.lease_id, now)

    def find(self, attachment_id: str, lease_id: int, now: float) -> Lease:
        """A lease that still holds. Raises NotFound."""
        self._expire_all(now)
        lease = self._attachments.of(attachment_id).leases.get(lease_id)
        if lease is None:
            raise NotFound("no such lease, or it has expired", field="lease_id")
        return lease

    def release(self, attachment_id: str, lease_ids: Sequence[int], now: float) -> list[bool]:
        """Gives leases back. False: it had expired already."""
        self._expire_all(now)
        attachment = self._attachments.of(attachment_id)
        return [self._release(attachment, lease_id, now) for lease_id in lease_ids]

    def release_all(self, attachment: Attachment, now: float) -> None:
        """Gives back all that an attachment has leased; it has ended."""
        for lease_id in list(attachment.leases):
            self._release(attachment, lease_id, now)

    def _release(self, attachment: Attachment, lease_id: int, now: float) -> bool:
        lease = attachment.leases.pop(lease_id, None)
        if lease is None:
            return False
        del self._leases[lease_id]
        for block in lease.blocks:
            self._shelf.unpin(block, now)
        return True

    def next_end(self) -> float | None:
        """When the next lease may end by itself."""
        return self._ends.first()

    def expire(self, now: float) -> None:
        """Ends the leases whose time is over."""
        for lease_id in self._ends.due(now):
            lease = self._leases.get(lease_id)
            if lease is not None:
                self.expired += 1
                self._release(self._attachments.of(lease.attachment), lease_id, now)
