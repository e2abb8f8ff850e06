"""Staying connected to a peer that may leave and come back: the one loop for all who do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc
from structlog.typing import FilteringBoundLogger

_FINAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""The peer refuses this client: only an operator, or another member's leaving, changes that."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between two attempts. Each pause is drawn from its upper half, so that peers don't come in step."""

    first: float = 0.05
    longest: float = 2.0
    refused: float = 5.0
    """After a refusal, which is unlikely to be another answer soon."""


class Unsuitable(Exception):
    """Raised by `connect` for a peer that answers and can't be used; its message says why."""


class Connection:
    """One attempt. `established` is set by whoever connects, once the peer has answered."""

    def __init__(self) -> None:
        self.established = False


async def stay(
    connect: Callable[[Connection], Awaitable[None]],
    *,
    peer: str,
    log: FilteringBoundLogger,
    pauses: Pauses | None = None,
) -> NoReturn:
    """Calls `connect` again and again until cancelled; `peer` names the other side in the log.

    `connect` sets `established` when the peer has answered, and returns or raises AioRpcError or TimeoutError when the
    connection has ended, or Unsuitable. After an established connection the pauses begin anew, else they double up to
    the longest.
    A reason that was logged for the attempt before is not logged again. Any other error is the caller's defect: it goes
    out, to the policy of the background task that this is.
    """
    pauses = pauses or Pauses()
    pause, said = pauses.first, ""
    while True:
        connection = Connection()
        reason, refused = "the other side ended the stream", False
        try:
            await connect(connection)
        except TimeoutError:
            reason = "no answer in time"
        except Unsuitable as error:
            reason, refused = str(error), True
        except grpc.aio.AioRpcError as error:
            reason, refused = error.details() or error.code().name, error.code() in _FINAL
        if connection.established:
            pause = pauses.first
            log.warning("connection lost", peer=peer, reason=reason)
        elif refused and reason != said:
            log.error("connection refused", peer=peer, reason=reason)
        elif reason != said:
            log.info("not connected", peer=peer, reason=reason)
        said = "" if connection.established else reason
        await asyncio.sleep((pauses.refused if refused else pause) * random.uniform(0.5, 1.0))
        pause = min(2 * pause, pauses.longest)
