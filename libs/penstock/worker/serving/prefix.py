"""The decode side of a hand-off: fetch blocks while prefill still computes, then take its first token and tail."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import grpc
import structlog
import xxhash

from penstock.engine.hooks import LoadResult, PageWriter
from penstock.rpc.context import outgoing
from penstock.runtime.metrics import WorkerMetrics
from penstock.v1 import prefill_pb2, prefill_pb2_grpc
from penstock.worker.convert import token_from_message
from penstock.worker.rates import FetchRates
from penstock.worker.worker import Work

_OLD_S = 60.0
"""A token that has waited longer for its decode worker says nothing about hand-offs."""
_LOG = structlog.get_logger("penstock.worker")


class HandoffFault(Exception):
    """The hand-off ended without a usable token."""


class HandoffPrefix:
    """KvSource: the KV that a prefill worker computes for this request right now.

    When the hand-off fails, what was fetched so far still counts, the engine computes the rest, and the request's
    tokens begin with the first instead of the second. When only the store fails, the first token still counts.
    """

    def __init__(
        self,
        lent: Callable[[], AbstractAsyncContextManager[grpc.aio.Channel]],
        asked: prefill_pb2.HandoffRequest,
        work: Work,
        costs: FetchRates,
        timeout_s: float | None,
        *,
        block_bytes: int,
        metrics: WorkerMetrics,
    ) -> None:
        """`lent` gives the channel to the prefill worker. `costs` learn from this one. `block_bytes` is the most that a
        part of a block may have."""
        self._lent = lent
        self._asked = asked
        self._costs = costs
        self._fetcher = work.fetcher
        self._block_bytes = block_bytes
        self._fetchable = work.fetchable
        self._timeout_s = timeout_s
        self._metrics = metrics
        self.failed = False

    async def load(self, pages: PageWriter) -> LoadResult:
        """Follows the prefill to its end."""
        try:
            return await self._follow(pages)
        except (grpc.aio.AioRpcError, HandoffFault) as fault:
            self.failed = True
            self._metrics.handoff_faults.inc()
            reason = fault.details() if isinstance(fault, grpc.aio.AioRpcError) else str(fault)
            _LOG.warning("hand-off became a recompute", reason=reason)
        await self._fetcher.upto(self._fetchable, pages)
        await self._fetcher.conclude(pages)
        valid = self._fetcher.blocks * self._fetcher.block_size
        return LoadResult(valid_tokens=valid, cached_tokens=valid)

    async def _follow(self, pages: PageWriter) -> LoadResult:
        async with self._lent() as channel:
            return await self._follow_at(prefill_pb2_grpc.PrefillStub(channel), pages)

    async def _follow_at(self, stub: prefill_pb2_grpc.PrefillAsyncStub, pages: PageWriter) -> LoadResult:
        call = stub.Handoff(self._asked, timeout=self._timeout_s, metadata=outgoing())
        done: prefill_pb2.Handoff | None = None
        heard_at = 0.0
        tail = bytearray()
        try:
            async for event in call:
                kind = event.WhichOneof("kind")
                if kind == "stored_blocks":
                    planned = len(self._fetcher.keys)
                    await self._fetcher.upto(min(event.stored_blocks, planned), pages, planned=planned)
                elif kind == "done":
                    done, heard_at = event.done, time.monotonic()
                elif kind == "tail":
                    tail += event.tail
                    if len(tail) > self._block_bytes:
                        raise HandoffFault("the part of a block is longer than a block")
        finally:
            call.cancel()
        if done is None:
            raise HandoffFault("the stream ended before the token")
        result = await self._take(done, bytes(tail), pages)
        if result.valid_tokens == done.valid_tokens and 0 <= done.age_s <= _OLD_S:
            fetched = [tier for tier in self._fetcher.tiers if tier != "worker"]
            size = self._fetcher.fetched_bytes + len(tail)
            self._costs.fetched(fetched, size, time.monotonic() - heard_at + done.age_s)
        return result

    async def _take(self, done: prefill_pb2.Handoff, tail: bytes, pages: PageWriter) -> LoadResult:
        await self._fetcher.conclude(pages)
        token = token_from_message(done.token)
        size = self._fetcher.block_size
        full, rest = divmod(done.valid_tokens, size)
        valid = min(self._fetcher.blocks, full) * size
        whole = self._fetcher.blocks >= full and len(tail) == done.tail_bytes
        intact = whole and rest > 0 and xxhash.xxh3_128_digest(tail) == done.tail_checksum
        if intact and await pages.write(full, [memoryview(tail)]):
            valid = done.valid_tokens
        return LoadResult(valid_tokens=valid, output=(token,), cached_tokens=0)
