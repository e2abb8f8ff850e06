"""What a client holds in a store, and how it gives that back without making anybody wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.kv.link import Link, Session, StoreFault
from penstock.v1 import kvstore_pb2


class Loans:
    """Leases and reservations of one client. Run `tidy` beside its users; `close` at the end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases: list[tuple[Session, int]] = []
        self._device_leases: list[tuple[Session, int]] = []
        self._unwritten: list[tuple[Session, kvstore_pb2.CommitBlock]] = []
        self._wake = asyncio.Event()
        self._strays: set[asyncio.Task[Any]] = set()

    async def gain(self, session: Session, method: Any, request: Any, give_back: Callable[[Session, Any], None]) -> Any:
        """A call that brings a loan. When its caller is cancelled it goes on alone, to give back what it brings."""
        calling = asyncio.ensure_future(self._link.call(session, method, request))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            self._strays.add(calling)
            calling.add_done_callback(lambda done: self._came_too_late(session, done, give_back))
            raise

    def _came_too_late(
        self, session: Session, done: asyncio.Task[Any], give_back: Callable[[Session, Any], None]
    ) -> None:
        self._strays.discard(done)
        if not done.cancelled() and done.exception() is None:
            give_back(session, done.result())

    def end_lease(self, session: Session, response: kvstore_pb2.LeaseResponse) -> None:
        """Soon gives the pins back."""
        if response.lease_id:
            self._leases.append((session, response.lease_id))
        if response.device.lease_id:
            self._device_leases.append((session, response.device.lease_id))
        if response.lease_id or response.device.lease_id:
            self._wake.set()

    def end_reservations(
        self, session: Session, keys: Sequence[bytes], rooms: Sequence[kvstore_pb2.Reservation]
    ) -> None:
        """Soon gives room back into which nothing was, or will be, written."""
        for key, room in zip(keys, rooms, strict=False):
            if room.state == kvstore_pb2.Reservation.STATE_WRITE:
                self._unwritten.append((session, kvstore_pb2.CommitBlock(key=key, epoch=room.epoch)))
        self._wake.set()

    async def tidy(self) -> None:
        """Gives back until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            leases, self._leases = self._leases, []
            device_leases, self._device_leases = self._device_leases, []
            unwritten, self._unwritten = self._unwritten, []
            session = self._link.session
            if session is None:
                continue  # the store took everything back with the session
            release = kvstore_pb2.ReleaseRequest(
                session_id=session.session_id,
                lease_ids=[lease_id for owner, lease_id in leases if owner is session],
                device_lease_ids=[lease_id for owner, lease_id in device_leases if owner is session],
            )
            blocks = [block for owner, block in unwritten if owner is session]
            with suppress(StoreFault):
                await self._give_back(session, release, blocks)

    async def _give_back(
        self, session: Session, release: kvstore_pb2.ReleaseRequest, blocks: list[kvstore_pb2.CommitBlock]
    ) -> None:
        link = self._link
        if release.lease_ids or release.device_lease_ids:
            answer = await link.call(session, link.rpc.Release, release)
            released = [*answer.released, *answer.device_released]
            link.stats.lapsed += len(released) - sum(released)
        if blocks:
            commit = kvstore_pb2.CommitRequest(session_id=session.session_id, blocks=blocks)
            await link.call(session, link.rpc.Commit, commit)

    def close(self) -> None:
        """Waits for nothing more."""
        for stray in list(self._strays):
            stray.cancel()
