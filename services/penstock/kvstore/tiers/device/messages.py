"""The device tier as clients meet it: its messages, and nothing of it where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from penstock.kvstore.checks import check_count
from penstock.kvstore.table.blocks import Lease
from penstock.kvstore.tiers.device.tier import GpuTier
from penstock.v1 import kvstore_pb2


class DeviceFace:
    """The part of each rpc that concerns the device; without a tier every answer is empty."""

    def __init__(self, tier: GpuTier | None) -> None:
        self._tier = tier

    def attach(self, attachment_id: str, request: kvstore_pb2.AttachRequest) -> kvstore_pb2.DeviceMemory | None:
        """What a client gets that can read on the store's device."""
        place = self._tier.place() if self._tier is not None else None
        if self._tier is None or place is None or place.uuid != request.device:
            return None
        self._tier.attach(attachment_id, request.client)
        return kvstore_pb2.DeviceMemory(
            uuid=place.uuid,
            handle=place.handle,
            arena_bytes=place.arena_bytes,
            slot_stride=place.stride,
            slots=place.slots,
            epochs_path=place.epochs_path,
            epochs_id=place.epochs_id,
        )

    def detach(self, attachment_id: str) -> None:
        """Takes back what the attachment has here."""
        if self._tier is not None:
            self._tier.detach(attachment_id)

    @contextmanager
    def leasing(
        self, request: kvstore_pb2.LeaseRequest, keys: Sequence[bytes], seconds: float
    ) -> Iterator[kvstore_pb2.DeviceLease | None]:
        """The leading blocks on the device, pinned; given back when the rest of the lease fails."""
        tier, lease = self._tier, None
        if tier is not None and request.on_device:
            lease = tier.lease(request.attachment_id, keys, seconds, request.session)
        if tier is None or lease is None:
            yield None
            return
        try:
            yield kvstore_pb2.DeviceLease(
                lease_id=lease.lease_id,
                offsets=[tier.offset(block) for block in lease.blocks],
                epochs=[block.epoch for block in lease.blocks],
                checksums=b"".join(block.checksum for block in lease.blocks),
            )
        except BaseException:
            tier.abandon(lease)
            raise

    def used(self, lease: Lease | None) -> None:
        """Blocks of host memory were leased."""
        if self._tier is not None and lease is not None:
            self._tier.used(lease.blocks)

    def release(self, request: kvstore_pb2.ReleaseRequest) -> list[bool]:
        """One answer per lease."""
        check_count("device_lease_ids", request.device_lease_ids)
        if self._tier is None:
            return [False] * len(request.device_lease_ids)
        return self._tier.release(request.attachment_id, request.device_lease_ids)

    def quarantine(self, request: kvstore_pb2.QuarantineRequest) -> bool:
        """Whether it was a block on the device."""
        return self._tier is not None and self._tier.quarantine(request.attachment_id, request.key, request.epoch)

    def stats(self) -> kvstore_pb2.GpuStats | None:
        """None: there is no such tier."""
        return kvstore_pb2.GpuStats(**asdict(self._tier.stats())) if self._tier is not None else None
