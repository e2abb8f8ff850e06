"""Waits for blocks that workers of other hosts compute."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import structlog

from penstock.kv.identity import MAX_KEYS
from penstock.kv.pace import Pace, pace_to_message
from penstock.kvstore.claiming import Waited, WaitEnd
from penstock.kvstore.elsewhere.neighbours import Neighbours
from penstock.kvstore.elsewhere.pulling import MOST_SOURCES
from penstock.rpc.context import outgoing
from penstock.v1 import kvstore_pb2

_GRACE_S = 0.25
"""A store that knows of nobody, or waits as long as it was told, answers within this."""
WAITS = {
    WaitEnd.NONE: kvstore_pb2.ClaimResponse.WAIT_NONE,
    WaitEnd.STORED: kvstore_pb2.ClaimResponse.WAIT_STORED,
    WaitEnd.LEFT: kvstore_pb2.ClaimResponse.WAIT_LEFT,
    WaitEnd.LATE: kvstore_pb2.ClaimResponse.WAIT_LATE,
}
"""How a wait ended, as it stands in an answer."""
_ENDS = {wait: end for end, wait in WAITS.items() if end is not WaitEnd.NONE}


class RemoteWaits:
    """OtherHosts: asks the stores one after the other, until one has waited."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._log = structlog.get_logger("penstock.kvstore")

    async def wait(self, sources: Sequence[str], keys: Sequence[bytes], pace: Pace, within_s: float) -> Waited:
        """See OtherHosts. A store that fails meanwhile computes nothing any more; it is left alone for a while."""
        request = kvstore_pb2.ClaimRequest(keys=keys[:MAX_KEYS], pace=pace_to_message(pace), peer=True)
        for source in self._neighbours.usable(sources)[:MOST_SOURCES]:
            call = self._neighbours.stub(source).Claim
            try:
                answer = await call(request, timeout=max(0.0, within_s) + _GRACE_S, metadata=outgoing())
            except grpc.aio.AioRpcError as error:
                self._neighbours.shunned.add(source)
                self._log.info("a wait for blocks of another host ended early", source=source, reason=error.details())
                late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                return Waited(0, WaitEnd.LATE if late else WaitEnd.LEFT)
            if answer.wait in _ENDS:
                return Waited(min(answer.found, len(keys)), _ENDS[answer.wait])
        return Waited()
