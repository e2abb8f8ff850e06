"""The client of a KV store, which the workers open with `open_store`.

The store is an optimisation, never an authority. Every failure is a `StoreFault` or a shorter answer, within
the time limit; a store that is away costs a caller microseconds, and is found again in the background.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from penstock.kv.bytes.pieces import split
from penstock.kv.client.claiming import Claimed, Claiming
from penstock.kv.client.lending import Lending
from penstock.kv.client.link import ClientStats, Link, StoreFault
from penstock.kv.client.loans import Loans
from penstock.kv.client.origin import NOBODY, Origin
from penstock.kv.client.reading import Leased, Reading, whole_blocks
from penstock.kv.client.writing import BlockPut, Writing
from penstock.kv.device.memory import Device
from penstock.kv.identity import KEY_BYTES, MAX_KEYS
from penstock.kv.pace import Pace
from penstock.kv.parts import BlockParts
from penstock.kv.spec import KvSpec
from penstock.runtime.tasks import Failed, beside
from penstock.runtime.threads import started_threads
from penstock.v1 import kvstore_pb2

__all__ = ["NOBODY", "BlockPut", "ClientStats", "Leased", "Origin", "StoreClient", "StoreFault", "open_store"]

_THREADS = 2
"""So that a read is not behind a large put."""


class StoreClient:
    """One client of one store. Made by `open_store`; used from its event loop.

    Every method raises StoreFault, at the latest after the time limit, when the store can't help.
    """

    def __init__(self, link: Link, loans: Loans) -> None:
        self._link = link
        self._reading = Reading(link, loans)
        self._writing = Writing(link, loans)
        self._claiming = Claiming(link, loans)
        self.lending = Lending(link)
        """For a client whose own memory the store can map."""

    @property
    def stats(self) -> ClientStats:
        return self._link.stats

    @property
    def connected(self) -> bool:
        """Whether a call would reach the store, as far as is known."""
        return self._link.attachment is not None

    @property
    def attachment(self) -> str:
        """Names the present attachment, with which the store's content is another; empty: not connected."""
        return "" if self._link.attachment is None else self._link.attachment.attachment_id

    @property
    def reason(self) -> str:
        """Why the store is not connected, for people."""
        return self._link.reason

    def on_attach(self, told: Callable[[], None]) -> None:
        """Calls `told` whenever there is a new attachment."""
        self._link.on_attach.append(told)

    async def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored."""
        attachment = self._link.need()
        if not keys:
            return 0
        request = kvstore_pb2.LookupRequest(keys=keys[:MAX_KEYS])
        found: int = (await self._link.call(attachment, self._link.rpc.Lookup, request)).found
        return found

    def lease(
        self,
        keys: Sequence[bytes],
        origin: Origin = NOBODY,
        *,
        checked: bool = True,
        on_device: bool = False,
        wait_s: float = 0.0,
        far: Callable[[int], int] = whole_blocks,
    ) -> AbstractAsyncContextManager[Leased]:
        """Pins and checks the leading stored blocks, in one round trip. A block that fails its check ends the prefix.

        Leaving the block gives the pins back without waiting. Without `checked` the reader has each block copied and
        checked by `Leased.copy`, which is faster: the bytes are read once. With `on_device` the leading blocks are
        left on the client's device as far as they are there, see `Leased.on_device`; the others follow in `blocks`.
        The store waits for blocks that it has to bring for `wait_s` at most; 0: as long as the time limit allows.
        `far` says, when so many blocks were found, of how many leading ones the far part is enough, where the client
        knows the parts of its blocks: only that is read and checked.
        """
        return self._reading.lease(keys, origin, checked, on_device, wait_s=wait_s, far=far)

    async def fetch(self, keys: Sequence[bytes], into: Sequence[memoryview], origin: Origin = NOBODY) -> list[str]:
        """Copies the leading stored blocks to `into`, a buffer for each key, and checks the copies.

        Returns where each block was: "gpu", "host", "nvme" or "remote"; as many as were copied and are right. The
        content of the other buffers is undefined. Cancelling is safe: when it returns, nothing writes to `into`.
        """
        return await self._reading.fetch(keys, into, origin)

    async def put(self, blocks: Sequence[BlockPut], origin: Origin = NOBODY) -> int:
        """Stores blocks that are not stored yet; returns how many were. Parents come before their children.

        The time limit holds for each 128 MiB. Cancelling is safe: when it returns, nothing reads `data` any more.
        """
        return await self._writing.put(blocks, origin)

    def next_claim(self) -> int:
        """A number for a claim, which no other claim of this client has."""
        return self._claiming.number()

    async def claim(self, number: int, keys: Sequence[bytes], pace: Pace, sources: Sequence[str] = ()) -> Claimed:
        """Says that this client is about to compute these blocks of one prompt, which the store lacks.

        First waits for the leading ones while others compute them and are expected to have them before this client
        would at `pace`, or hardly later: at most as long as `Pace.patience_s` of those blocks. Those that are not
        stored then, here or in one of the other stores `sources`, are claimed until they are stored or withdrawn. An
        earlier claim of the number is over. When cancelled, withdraw the number: the answer may have been on its way.
        """
        return await self._claiming.claim(number, keys, pace, sources)

    def withdraw(self, number: int) -> None:
        """Soon has the store know that the rest of a claim will not be stored."""
        self._claiming.withdraw(number)

    async def quarantine(self, key: bytes, epoch: int) -> bool:
        """Has a block taken out of service; False: it was not, or no longer, that block."""
        return await self._reading.quarantine(self._link.need(), key, epoch)

    async def retain(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> tuple[float, int]:
        """Has blocks kept, stored or still to come: for how long, and how many of the leading ones; zeros: none."""
        attachment = self._link.need()
        request = kvstore_pb2.RetainRequest(
            attachment_id=attachment.attachment_id, keys=keys[:MAX_KEYS], ttl_s=seconds, namespace=namespace
        )
        granted = await self._link.call(attachment, self._link.rpc.Retain, request)
        return granted.granted_s, granted.blocks

    async def touch(self, used: Sequence[tuple[str, Sequence[bytes]]]) -> list[bytes]:
        """Tells of blocks, by session, that were used from copies outside of the store: at most MAX_BATCH keys.

        Returns those that the store does not have."""
        attachment = self._link.need()
        request = kvstore_pb2.TouchRequest(
            attachment_id=attachment.attachment_id,
            used=[kvstore_pb2.TouchedBlocks(session=session, keys=b"".join(keys)) for session, keys in used],
        )
        answer = await self._link.call(attachment, self._link.rpc.Touch, request)
        if len(answer.absent) % KEY_BYTES:
            raise self._link.fault("the store's answer does not fit the question")
        return split(answer.absent, KEY_BYTES)


def _uncounted(task: str) -> None:
    """For clients without metrics: a failure of a background task is only logged."""


@asynccontextmanager
async def open_store(
    channel: grpc.aio.Channel | None,
    client: str,
    spec: KvSpec,
    host_id: str,
    *,
    timeout_s: float = 2.0,
    device: Device | None = None,
    draft: bool = False,
    parts: BlockParts | None = None,
    failed: Failed = _uncounted,
) -> AsyncIterator[StoreClient]:
    """A client of the store behind `channel`, for blocks of `spec`; without a channel it is never connected.

    `client` is a name for the store's log. When the store has the same `host_id` its memory is mapped, else bytes
    are streamed. No call takes longer than `timeout_s`. Opens also without a store: the client looks for it in
    the background, and again after losing it. With a `device`, blocks of a store on the same one are read there.
    `draft`: the blocks are those of a draft model. A `spec` of sealed blocks has them sealed and opened here, with the
    key of each call's Origin. A `spec` of `parted` blocks comes with their `parts`: their marks are made and checked
    here.
    """
    with started_threads(_THREADS, "penstock-kv") as threads:
        link = Link(
            channel,
            client,
            spec,
            host_id=host_id,
            timeout_s=timeout_s,
            threads=threads,
            device=device,
            draft=draft,
            parts=parts,
        )
        loans = Loans(link, failed)
        async with (
            beside(link.stay_attached, name="attach", on_failure="restart", failed=failed),
            beside(loans.tidy, name="tidy", on_failure="restart", failed=failed),
        ):
            try:
                await link.first_attempt()
                yield StoreClient(link, loans)
            finally:
                await loans.close()
                link.close()
