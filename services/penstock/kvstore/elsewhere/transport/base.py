"""The contract of every way to move blocks between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.kv.spec import KvSpec

Reason = Literal["unreachable", "refused", "broken", "stalled", "late", "corrupt", "nonsense"]
"""Why a fetch ended early. unreachable: no connection; refused: the peer has another spec or accepts no more clients;
broken: the stream ended; stalled: nothing arrived for a while; late: the time was over; corrupt: a block did not match
its checksum; nonsense: an answer that does not fit the question."""


class TransportFault(Exception):
    """The peer can't help now. Blocks that landed before are good."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Offered:
    """A block that a peer holds, and all that a store needs to keep a copy of it."""

    key: bytes
    parent: bytes
    first_token: int
    checksum: bytes
    seconds: float = 0.0
    namespace: bytes = b""


class Landing(Protocol):
    """Where the blocks of one fetch go; the fetching store's side."""

    @property
    def namespace(self) -> bytes:
        """Of the tenant whose blocks they are; empty: unknown."""
        ...

    def room(self, offered: Sequence[Offered]) -> list[memoryview | None]:
        """For each block its buffer, of exactly a block's size and writable. None: not wanted. A shorter list: no room
        for the rest. The buffers are the caller's again when `fetch` returns or raises."""
        ...

    def landed(self, offered: Offered) -> None:
        """The buffer of this block holds its bytes, verified. Called once per wanted block, in order."""
        ...


@dataclass(slots=True)
class TransportStats:
    """Counters since the start."""

    blocks: int = 0
    """Landed."""
    bytes_in: int = 0
    """Received, whether or not the block was completed."""
    bytes_resumed: int = 0
    """Had arrived when a stream broke, and were not sent again."""
    seconds: float = 0.0
    """Spent in fetches."""
    resumptions: int = 0
    """Broken streams that were taken up again."""
    faults: Counter[str] = field(default_factory=Counter)
    """Fetches that ended early, by reason."""


class Transport(Protocol):
    """A way to get blocks from other stores."""

    @property
    def stats(self) -> TransportStats:
        """Counted by the transport itself."""
        ...

    async def fetch(self, peer: str, spec: KvSpec, keys: Sequence[bytes], landing: Landing, until: float) -> None:
        """Fetches the leading ones of `keys` that `peer` (an address) holds, until `until` of the monotonic clock.

        Every block is verified before it lands. Raises TransportFault when there might have been more; blocks that
        landed before stay landed. Also when cancelled, nothing writes into a buffer once this has returned.
        """
        ...
