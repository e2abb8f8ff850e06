"""The device as clients meet it: the part of each rpc that concerns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.kv.identity import MAX_KEYS
from penstock.kvstore.tiers.device.readers import DeviceReaders
from penstock.rpc.bounds import check_count
from penstock.v1 import kvstore_pb2


class NoDeviceFace:
    """Answers for a store without a device: every answer is empty."""

    def attach(self, attachment_id: str, request: kvstore_pb2.AttachRequest) -> kvstore_pb2.DeviceMemory | None:
        """The memory that a client may read on the store's device; None: it can't read there."""
        return None

    def detach(self, attachment_id: str) -> None:
        """Takes back the leases that the attachment has here."""

    @contextmanager
    def leasing(
        self, request: kvstore_pb2.LeaseRequest, keys: Sequence[bytes], seconds: float
    ) -> Iterator[kvstore_pb2.DeviceLease | None]:
        """The leading blocks on the device, pinned; given back when the rest of the lease fails."""
        yield None

    def release(self, request: kvstore_pb2.ReleaseRequest) -> list[bool]:
        """One answer per lease."""
        check_count("device_lease_ids", request.device_lease_ids, MAX_KEYS)
        return [False] * len(request.device_lease_ids)

    def quarantine(self, request: kvstore_pb2.QuarantineRequest) -> bool:
        """Whether it was a block on the device."""
        return False


class DeviceFace(NoDeviceFace):
    """Answers for a store with a device."""

    def __init__(self, readers: DeviceReaders) -> None:
        self._readers = readers

    def attach(self, attachment_id: str, request: kvstore_pb2.AttachRequest) -> kvstore_pb2.DeviceMemory | None:
        """Lets a client on the store's device read there; returns what it needs for that, or None on another device."""
        place = self._readers.place()
        if place is None or place.uuid != request.device:
            return None
        self._readers.attach(attachment_id, request.client)
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
        """Takes back all that the attachment has leased on the device."""
        self._readers.detach(attachment_id)

    @contextmanager
    def leasing(
        self, request: kvstore_pb2.LeaseRequest, keys: Sequence[bytes], seconds: float
    ) -> Iterator[kvstore_pb2.DeviceLease | None]:
        """Pins the leading blocks on the device if asked to, and unpins them when the rest of the lease fails."""
        lease = None
        if request.on_device:
            lease = self._readers.lease(request.attachment_id, keys, seconds, request.session)
        if lease is None:
            yield None
            return
        try:
            yield kvstore_pb2.DeviceLease(
                lease_id=lease.lease_id,
                offsets=[self._readers.offset(block) for block in lease.blocks],
                epochs=[block.epoch for block in lease.blocks],
                checksums=b"".join(block.checksum for block in lease.blocks),
            )
        except BaseException:
            self._readers.abandon(lease)
            raise

    def release(self, request: kvstore_pb2.ReleaseRequest) -> list[bool]:
        """Gives leases on the device back, with one answer per lease; False: it had expired. Raises InvalidRequest."""
        check_count("device_lease_ids", request.device_lease_ids, MAX_KEYS)
        return self._readers.release(request.attachment_id, request.device_lease_ids)

    def quarantine(self, request: kvstore_pb2.QuarantineRequest) -> bool:
        """Takes a block on the device out of service; False: it was not, or no longer, that block."""
        return self._readers.quarantine(request.attachment_id, request.key, request.epoch)
