"""The claiming part of a client: says which blocks it computes, and waits for those that others do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.kv.client.link import Link
from penstock.kv.client.loans import Loans
from penstock.kv.identity import MAX_KEYS
from penstock.kv.pace import Pace, pace_to_message
from penstock.v1 import kvstore_pb2

ClaimWait = Literal["none", "stored", "left", "late"]
_WAITS: dict[int, ClaimWait] = {
    kvstore_pb2.ClaimResponse.WAIT_STORED: "stored",
    kvstore_pb2.ClaimResponse.WAIT_LEFT: "left",
    kvstore_pb2.ClaimResponse.WAIT_LATE: "late",
}


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim."""

    found: int
    """Leading blocks that are stored now."""
    wait: ClaimWait
    """How the wait for others ended, if there was one: with the blocks, when nobody computed them any more, or when the
    client would have computed them."""


class Claiming:
    """The claims of a client."""

    def __init__(self, link: Link, loans: Loans) -> None:
        self._link = link
        self._loans = loans
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Names a new claim."""
        return next(self._numbers)

    async def claim(self, number: int, keys: Sequence[bytes], pace: Pace, sources: Sequence[str]) -> Claimed:
        """See StoreClient.claim."""
        attachment = self._link.need()
        keys = keys[:MAX_KEYS]
        request = kvstore_pb2.ClaimRequest(
            attachment_id=attachment.attachment_id,
            number=number,
            keys=keys,
            sources=sources,
            pace=pace_to_message(pace),
        )
        patience = pace.patience_s(len(keys))
        answer = await self._link.call(attachment, self._link.rpc.Claim, request, more_s=patience)
        return Claimed(min(answer.found, len(keys)), _WAITS.get(answer.wait, "none"))

    def withdraw(self, number: int) -> None:
        """Soon tells the store."""
        if self._link.attachment is not None:
            self._loans.end_claim(self._link.attachment, number)
