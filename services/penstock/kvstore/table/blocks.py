"""Plain data about blocks, reservations, leases and attachments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from penstock.kv.eviction.base import EvictionPolicy


class TierKind(IntEnum):
    """Where a block is, the nearest first. The numbers are those of the wire."""

    GPU = 1
    HOST = 2
    NVME = 3
    REMOTE = 4


@dataclass(slots=True, eq=False)
class Block:
    """A slot with a holder. It is reserved until it has a checksum, stored from then on."""

    key: bytes
    parent: bytes
    first_token: int
    slot: int
    epoch: int
    """Names this holding of this slot; never used twice."""
    owner: str
    """The attachment that reserved it."""
    checksum: bytes = b""
    pins: int = 0
    """Leases that hold it."""
    used: int = 0
    """Tick of the last use."""
    session: str = ""
    """Digest of the session that asked for it or wrote it; empty: unknown; SEVERAL: more than one did."""
    namespace: bytes = b""
    """The tenant's, 16 bytes; empty: unknown."""
    seconds: float = 0.0
    """What computing it took; 0: unknown."""
    uses: int = 0
    """Leases of it, and attempts to store it again, since it was stored. Those close together count as one."""
    used_at: float = 0.0
    """When it was last used, in seconds of the table's clock."""
    counted_at: float = 0.0
    """When the last use that counts began."""
    turn: int = 0
    """Blocks among its ancestors that had been used again when the next one was stored: turns before its own."""
    retained_until: float = 0.0
    """A tenant was promised that it stays until then, in seconds of the table's clock; 0: none was."""
    behind: bytes = b""
    """Of a block that a client lends: what is behind the bytes in its page."""
    note: Any = None
    """The eviction policy's own mark."""

    def wanted(self) -> Wanted:
        """What to ask a table for, to hold a copy of this block."""
        return Wanted(
            self.key,
            self.parent,
            self.first_token,
            seconds=self.seconds,
            session=self.session,
            namespace=self.namespace,
        )

    def inherit(self, block: Block) -> None:
        """Gives this copy the history of its block, by which policies rank it."""
        self.uses, self.turn = block.uses, block.turn


BlockPolicy = EvictionPolicy[Block]
MakePolicy = Callable[[], BlockPolicy]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that a client would like to store."""

    key: bytes
    parent: bytes
    first_token: int
    seconds: float = 0.0
    session: str = ""
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class Written:
    """A reserved block whose bytes are in place; without a checksum it is given back."""

    key: bytes
    epoch: int
    checksum: bytes


class ReserveState(Enum):
    """The answer to a wish for a slot."""

    WRITE = 1
    EXISTS = 2
    FULL = 3


@dataclass(frozen=True, slots=True)
class Reserved:
    """`block` is set exactly when `state` is WRITE."""

    state: ReserveState
    block: Block | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on `blocks`. They stay where they are until release, deadline, or the end of the attachment."""

    lease_id: int
    attachment: str
    blocks: list[Block]
    deadline: float
    session: str = ""
    brought: dict[int, TierKind] = field(default_factory=dict)
    """Where the blocks were, by index, that were not in host memory when they were asked for."""
    more: bool = False
    """The time ended while more was on its way."""


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A use of blocks that are in host memory."""

    session: str
    """Digest of the session; empty: unknown."""
    blocks: Sequence[Block]
    """One behind the other in a prompt."""
    brought: int = 0
    """Those of them that were not in host memory when they were asked for."""


@dataclass(slots=True, eq=False)
class Attachment:
    """A client while its Attach stream is open, and all that it owns."""

    attachment_id: str
    client: str
    leases: dict[int, Lease] = field(default_factory=dict)
    reserved: dict[bytes, Block] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableStats:
    """Counted by the store itself; metrics, tests and the wire read the same numbers."""

    slots: int
    blocks: int
    """Stored and findable."""
    reserved: int
    detached: int
    """Quarantined or discarded, but still leased."""
    cooling: int
    """Slots that rest because a late write into them can't be excluded."""
    used_bytes: int
    """Of stored, reserved and detached blocks."""
    leases: int
    attachments: int
    hits: int
    """Blocks leased."""
    misses: int
    """Blocks asked for in a lease and not found."""
    puts: int
    """Blocks that clients stored."""
    brought: int
    """Blocks that came from slower tiers."""
    evictions: int
    quarantined: int
    refused_commits: int
    expired_leases: int
    expired_reservations: int
    retained: int
    """Blocks that were promised to be kept, stored or not."""
