"""Which blocks go to the device, and which come back when they have to leave it. Pure.

A device slot is scarce, and a copy up costs bandwidth that engines use too. So a block that was leased has to show that
it will be asked for again: it came back after a while before, several sessions use it, or its session is active or
expected soon. Blocks go up in the order of their prefix, since a child without its parent is useless to readers
on the device; so room for them is never made of what comes before them. A block that leaves the device while host
memory still has it is just dropped; the only copy of one that is worth anything goes down first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.kv.eviction import SEVERAL
from penstock.kvstore.sessions import KnownSession, SessionPhase
from penstock.kvstore.table.blocks import Block

Look = Callable[[str], KnownSession | None]
Has = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Movement:
    """The rules; times in seconds."""

    uses: int = 1
    """Separate uses after which a block is taken to come back again."""
    horizon_s: float = 30.0
    """A session that is expected back within this time counts as active."""

    def shared(self, block: Block) -> bool:
        """Whether it was asked for again and again, or by several."""
        return block.uses >= self.uses or block.session == SEVERAL

    def returns(self, block: Block, look: Look, now: float) -> bool:
        """Whether its session runs, or will soon."""
        known = look(block.session) if block.session else None
        if known is None or known.state is SessionPhase.ENDED:
            return False
        return known.state is SessionPhase.ACTIVE or known.expected_at - now <= self.horizon_s

    def promotes(self, block: Block, look: Look, now: float) -> bool:
        """Whether a block of the host that was leased is worth a device slot."""
        return self.shared(block) or self.returns(block, look, now)

    def demotes(self, block: Block, look: Look, now: float) -> bool:
        """Whether a block that has to leave the device is worth a slot of the host."""
        return self.shared(block) or block.retained_until > now or self.returns(block, look, now)

    def batch(self, candidates: Iterable[Block], limit: int, on_device: Has, look: Look, now: float) -> list[Block]:
        """The first of the candidates that should go up together, parents first, at most `limit`."""
        chosen: list[Block] = []
        going: set[bytes] = set()
        for block in candidates:
            if len(chosen) == limit:
                break
            if block.key in going or on_device(block.key) or not self.promotes(block, look, now):
                continue
            if block.first_token == 0 or block.parent in going or on_device(block.parent):
                going.add(block.key)
                chosen.append(block)
        return chosen
