"""Clients that read blocks on the device, where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.kvstore.table.blocks import Block, Lease
from penstock.kvstore.tiers.device.form import DeviceBlocks, DevicePlace


class DeviceReaders:
    """The attachments, leases and complaints of these clients, apart from those of host memory."""

    def __init__(self, blocks: DeviceBlocks, now: Callable[[], float]) -> None:
        self._blocks = blocks
        self._now = now

    def place(self) -> DevicePlace | None:
        """Where clients of the same device find the blocks; None: no block can be there."""
        return self._blocks.place()

    def attach(self, attachment_id: str, client: str) -> None:
        """The client reads on the device."""
        self._blocks.form.table.attach(attachment_id, client)

    def detach(self, attachment_id: str) -> None:
        """Takes back all that the attachment has leased here, if it reads here at all."""
        if attachment_id in self._blocks.form.table.attachments:
            self._blocks.form.table.detach(attachment_id, self._now())

    def lease(self, attachment_id: str, keys: Sequence[bytes], seconds: float, session: str) -> Lease | None:
        """Pins the leading blocks that are on the device, for an attachment that reads there."""
        table = self._blocks.form.table
        if self._blocks.off or attachment_id not in table.attachments:
            return None
        return table.leases.take(attachment_id, keys, seconds, self._now(), session)

    def abandon(self, lease: Lease) -> None:
        """Gives a lease back that no client will be told of."""
        self._blocks.form.table.leases.abandon(lease, self._now())

    def release(self, attachment_id: str, lease_ids: Sequence[int]) -> list[bool]:
        """Gives leases back. False: it had expired."""
        table = self._blocks.form.table
        if attachment_id not in table.attachments:
            return [False] * len(lease_ids)
        return table.leases.release(attachment_id, lease_ids, self._now())

    def quarantine(self, attachment_id: str, key: bytes, epoch: int) -> bool:
        """Takes a block out of service that a client found wrong on the device."""
        table = self._blocks.form.table
        return attachment_id in table.attachments and table.quarantine(attachment_id, key, epoch, self._now())

    def offset(self, block: Block) -> int:
        """Where a block of a lease begins."""
        return self._blocks.form.offset(block)
