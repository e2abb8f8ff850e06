"""The leases, reservations and claims of a client, which it gives back without making its callers wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.kv.client.link import AttachStream, Link, Method, RequestT, ResponseT, StoreFault
from penstock.kv.identity import MAX_BATCH
from penstock.runtime.tasks import Failed, end, start
from penstock.v1 import kvstore_pb2


class Loans:
    """Leases, reservations and claims of one client. Run `tidy` while it is in use; `close` at the end."""

    def __init__(self, link: Link, failed: Failed) -> None:
        self._link = link
        self._failed = failed
        self._leases: list[tuple[AttachStream, int]] = []
        self._device_leases: list[tuple[AttachStream, int]] = []
        self._unwritten: list[tuple[AttachStream, kvstore_pb2.CommitBlock]] = []
        self._claims: list[tuple[AttachStream, int]] = []
        self._wake = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()

    async def gain(
        self,
        attachment: AttachStream,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        give_back: Callable[[AttachStream, ResponseT], None],
    ) -> ResponseT:
        """Makes a call that brings a loan. When the caller is cancelled the call goes on alone and returns the loan."""
        answer: asyncio.Future[ResponseT] = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            try:
                response = await self._link.call(attachment, method, request)
            except StoreFault as fault:
                if not answer.cancelled():
                    answer.set_exception(fault)
                return
            if answer.cancelled():
                give_back(attachment, response)
            else:
                answer.set_result(response)

        asking = start(ask, name="loan", on_failure="log", failed=self._failed)
        self._asking.add(asking)
        asking.add_done_callback(lambda _: self._asked(asking, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:  # both in one turn of the loop
                give_back(attachment, answer.result())
            raise

    def _asked(self, asking: asyncio.Task[None], answer: asyncio.Future[ResponseT]) -> None:
        self._asking.discard(asking)
        answer.cancel()  # without an answer: nothing will come

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
        """Gives reservations back in the background. The caller has stopped writing into them."""
        for key, room in zip(keys, rooms, strict=False):
            if room.state == kvstore_pb2.Reservation.STATE_WRITE:
                self._unwritten.append((attachment, kvstore_pb2.CommitBlock(key=key, epoch=room.epoch)))
        self._wake.set()

    def end_claim(self, attachment: AttachStream, number: int) -> None:
        """Soon withdraws a claim."""
        self._claims.append((attachment, number))
        self._wake.set()

    async def tidy(self) -> None:
        """Gives back until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            leases, self._leases = self._leases, []
            device_leases, self._device_leases = self._device_leases, []
            unwritten, self._unwritten = self._unwritten, []
            claims, self._claims = self._claims, []
            attachment = self._link.attachment
            if attachment is None:
                continue  # the store took everything back with the attachment
            release = kvstore_pb2.ReleaseRequest(
                attachment_id=attachment.attachment_id,
                lease_ids=[lease_id for owner, lease_id in leases if owner is attachment],
                device_lease_ids=[lease_id for owner, lease_id in device_leases if owner is attachment],
            )
            withdraw = kvstore_pb2.WithdrawRequest(
                attachment_id=attachment.attachment_id,
                numbers=[number for owner, number in claims if owner is attachment],
            )
            blocks = [block for owner, block in unwritten if owner is attachment]
            with suppress(StoreFault):
                if withdraw.numbers:
                    await self._link.call(attachment, self._link.rpc.Withdraw, withdraw)
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
        for begin in range(0, len(blocks), MAX_BATCH):
            some = blocks[begin : begin + MAX_BATCH]
            commit = kvstore_pb2.CommitRequest(attachment_id=attachment.attachment_id, blocks=some)
            await link.call(attachment, link.rpc.Commit, commit)

    async def close(self) -> None:
        """Waits for no answer any more: the store takes everything back with the attachment."""
        await end(*self._asking)
