"""The part of a block that eviction policies see, and the protocol of the policies."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from penstock.kv.hint import ReturnHint

SEVERAL = "*"
"""Stands for the sessions of a block that more than one session uses."""


class Evictable(Protocol):
    """A block, as far as policies read it. All blocks of one table have the same number of bytes and tokens."""

    key: bytes
    first_token: int
    """Position of its first token in the prompt."""
    used: int
    """Tick of the last use: larger is later."""
    uses: int
    """Separate uses since it was stored; a policy may add those that it remembers from before an eviction."""
    used_at: float
    """When it was last used, in seconds of the clock."""
    turn: int
    """Turns of a session before the one that stored it, as far as its ancestors show."""
    seconds: float
    """What computing it took; 0: unknown."""
    session: str
    """Whose it is; empty: unknown; or SEVERAL."""
    note: Any
    """The policy's own mark; no other code touches it."""


class Owned(Evictable, Protocol):
    """A block of a tenant."""

    namespace: bytes
    """The tenant's; empty: unknown."""


class Keepable(Evictable, Protocol):
    """A block that a tenant may have been promised."""

    retained_until: float
    """The end of the promise, in seconds of the clock; 0: there is none."""


BlockT = TypeVar("BlockT", bound=Evictable)
KeepableT = TypeVar("KeepableT", bound=Keepable)
OwnedT = TypeVar("OwnedT", bound=Owned)


class EvictionPolicy(Protocol[BlockT]):
    """An order over the blocks that may be evicted.

    Only blocks that may go are offered: stored, not leased, and without a stored child. So no child is ever kept
    without its parent, whatever the policy chooses: the order inside a chain is by position, from its end.
    """

    def block_stored(self, block: BlockT) -> None:
        """`block` is new in the table. It may have been there before: see `Evictable.uses`."""

    def block_removed(self, block: BlockT) -> None:
        """`block` left the table, as a victim or otherwise; it is not on offer any more."""

    def block_used(self, block: BlockT) -> None:
        """A stored block was used again; `used_at` says when, `uses` whether it counts as separate."""

    def offer_block(self, block: BlockT) -> None:
        """`block` may go from now on, or was used while it might."""

    def withdraw_block(self, block: BlockT) -> None:
        """`block` may not go, or is gone. Unknown blocks are ignored."""

    def next_victim(self) -> BlockT | None:
        """Takes out the block that should go first; None when none may."""

    def expect_session(self, session: str, outlook: ReturnHint) -> None:
        """Takes a hint about the session's return, which holds until its next use."""

    def __len__(self) -> int:
        """Blocks that may go."""
        ...
