"""What a client holds in a store, and how it gives that back without making anybody wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.kv.client.link import AttachStream, Link, StoreFault
from penstock.v1 import kvstore_pb2


class Loans:
    """Leases and reservations of one client. Run `tidy` beside its users; `close` at the end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases: list[tuple[AttachStream, int]] = []
        self._device_leases: list[tuple[AttachStream, int]] = []
        self._unwritten: list[tuple[AttachStream, kvstore_pb2.CommitBlock]] = []
        self._wake = asyncio.Event()
        self._strays: set[asyncio.Task[Any]] = set()

    async def gain(
        self, attachment: AttachStream, method: Any, request: Any, give_back: Callable[[AttachStream, Any], None]
    ) -> Any:
        """A call that brings a loan. When its caller is cancelled it goes on alone, to give back what it brings."""
        calling = asyncio.ensure_future(self._link.call(attachment, method, request))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            self._strays.add(calling)
            calling.add_done_callback(lambda done: self._came_too_late(attachment, done, give_back))
            raise

    def _came_too_late(
        self, attachment: AttachStream, done: asyncio.Task[Any], give_back: Callable[[AttachStream, Any], None]
    ) -> None:
        self._strays.discard(done)
        if not done.cancelled() and done.exception() is None:
            give_back(attachment, done.result())

    def end_lease(self, attachment: AttachStream, response: kvstore_pb2.LeaseResponse) -> None:
        """Soon gives the pins back."""
        if response.lease_id:
            self._leases.append((attachment, response.lease_id))
        if response.device.lease_id:
            self._device_leases.append((attachment, response.device.lease_id))
        if response.lease_id or response.device.lease_id:
            self._wake.set()

    def end_reservations(
        self, attachment: AttachStream, keys: Sequence[bytes], rooms: Sequence[kvstore_pb2.Reservation]
    ) -> None:
        """Soon gives room back into which nothing was, or will be, written."""
        for key, room in zip(keys, rooms, strict=False):
            if room.state == kvstore_pb2.Reservation.STATE_WRITE:
                self._unwritten.append((attachment, kvstore_pb2.CommitBlock(key=key, epoch=room.epoch)))
        self._wake.set()

    async def tidy(self) -> None:
        """Gives back until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            leases, self._leases = self._leases, []
            device_leases, self._device_leases = self._device_leases, []
            unwritten, self._unwritten = self._unwritten, []
            attachment = self._link.attachment
            if attachment is None:
                continue  # the store took everything back with the attachment
            release = kvstore_pb2.ReleaseRequest(
                attachment_id=attachment.attachment_id,
                lease_ids=[lease_id for owner, lease_id in leases if owner is attachment],
                device_lease_ids=[lease_id for owner, lease_id in device_leases if owner is attachment],
            )
            blocks = [block for owner, block in unwritten if owner is attachment]
            with suppress(StoreFault):
                await self._give_back(attachment, release, blocks)

    async def _give_back(
        self, attachment: AttachStream, release: kvstore_pb2.ReleaseRequest, blocks: list[kvstore_pb2.CommitBlock]
    ) -> None:
        link = self._link
        if release.lease_ids or release.device_lease_ids:
            answer = await link.call(attachment, link.rpc.Release, release)
            released = [*answer.released, *answer.device_released]
            link.stats.lapsed += len(released) - sum(released)
        if blocks:
            commit = kvstore_pb2.CommitRequest(attachment_id=attachment.attachment_id, blocks=blocks)
            await link.call(attachment, link.rpc.Commit, commit)

    def close(self) -> None:
        """Waits for nothing more."""
        for stray in list(self._strays):
            stray.cancel()
