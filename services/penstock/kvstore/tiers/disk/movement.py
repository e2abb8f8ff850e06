"""Which blocks should move between tiers. Pure: blocks in, a choice out.

Writing wears a disk out, and most blocks are never asked for again, so a block earns the disk by its
history: a tenant was promised that it stays, its session is expected back, it has been used again already, or blocks
of which no more is known have turned out to be used again often enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.kv.eviction.base import SEVERAL
from penstock.kvstore.sessions import KnownSession, SessionPhase
from penstock.kvstore.table.blocks import Block

THRESHOLD = 0.05
"""Share of fresh blocks that get used again, from which on fresh blocks are written."""
_MEMORY = 4096
_PRIOR = 64, 32
"""Before anything is known: as if 32 of 64 fresh blocks had been used again."""
_MOST_SESSIONS = 100_000


class Merit(IntEnum):
    """How much a block earns the disk, the most first."""

    PROMISED = 0
    EXPECTED = 1
    PROVEN = 2
    LIKELY = 3
    NONE = 4


@dataclass(slots=True)
class Reuse:
    """The share of blocks that get used again; forgets slowly."""

    seen: float = float(_PRIOR[0])
    again: float = float(_PRIOR[1])

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.again / self.seen

    def learn(self, used: bool) -> None:
        """The fate of one block is known."""
        self.seen += 1
        self.again += used
        if self.seen > _MEMORY:
            self.seen /= 2
            self.again /= 2


def worth(block: Block, known: KnownSession | None, share: float, now: float) -> Merit:
    """Judges whether a block of the host tier earns the disk. `known` describes its session."""
    if block.retained_until > now:
        return Merit.PROMISED
    if known is not None and known.state is not SessionPhase.ENDED:
        return Merit.EXPECTED
    if block.uses > 0:
        return Merit.PROVEN
    return Merit.LIKELY if share >= THRESHOLD else Merit.NONE


class Candidates:
    """Blocks of the host tier that are not on the disk: in line to be written, or left until more is known of them.

    Bounded by the host tier: its owner reports every block that comes, is used, or goes.
    """

    def __init__(self, judge: Callable[[Block], Merit]) -> None:
        self._judge = judge
        self._lines: list[OrderedDict[bytes, Block]] = [OrderedDict() for _ in Merit]
        self._place: dict[bytes, Merit] = {}

    def __len__(self) -> int:
        """Blocks that are to be written."""
        return len(self._place) - len(self._lines[Merit.NONE])

    @property
    def waiting(self) -> int:
        """Blocks that have not earned it yet."""
        return len(self._lines[Merit.NONE])

    def add(self, block: Block) -> None:
        """It came, or something new is known of it. Of equal worth, the one that came first goes first."""
        place, now = self._place.get(block.key), self._judge(block)
        if place is not now:
            self.discard(block.key)
            self._place[block.key] = now
            self._lines[now][block.key] = block

    def again(self, block: Block) -> None:
        """As `add`, when it is still in line."""
        if block.key in self._place:
            self.add(block)

    def discard(self, key: bytes) -> None:
        """It went, or is on the disk."""
        place = self._place.pop(key, None)
        if place is not None:
            del self._lines[place][key]

    def take(self, count: int) -> list[Block]:
        """Up to `count` blocks to write next, the worthiest first; they leave the line."""
        taken: list[Block] = []
        for line in self._lines[: Merit.NONE]:
            while line and len(taken) < count:
                key, block = line.popitem(last=False)
                del self._place[key]
                taken.append(block)
        return taken


class Ends:
    """The last block of each session's latest chain, for at most `most` sessions; it forgets the longest silent."""

    def __init__(self, most: int = _MOST_SESSIONS) -> None:
        self._most = most
        self._ends: OrderedDict[str, bytes] = OrderedDict()

    def at(self, session: str, key: bytes) -> None:
        """It used or wrote this block last."""
        if session and session != SEVERAL:
            self._ends[session] = key
            self._ends.move_to_end(session)
            if len(self._ends) > self._most:
                self._ends.popitem(last=False)

    def gone(self, block: Block) -> None:
        """Records that the block left every tier: the chain of its session now ends before it."""
        if self._ends.get(block.session) == block.key:
            self._ends[block.session] = block.parent

    def chain(self, session: str, find: Callable[[bytes], Block | None]) -> list[bytes]:
        """The keys that the session will ask for when it returns, in order; empty unless `find` knows them all."""
        chain: list[bytes] = []
        block = find(self._ends.get(session, b""))
        while block is not None:
            chain.append(block.key)
            if block.first_token == 0:
                return chain[::-1]
            block = find(block.parent)
        return []


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of blocks and sessions whatever space is open."""

    reuse: Reuse = field(default_factory=Reuse)
    ends: Ends = field(default_factory=Ends)
