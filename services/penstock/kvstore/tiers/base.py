"""The contracts of tiers, the places for blocks, and the slots of host memory into which blocks are brought."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kv.bytes.arena import Arena
from penstock.kv.hint import ReturnHint
from penstock.kv.spec import KvSpec
from penstock.kvstore.table.blocks import Block, MakePolicy, Reserved, ReserveState, TierKind, Wanted, Written
from penstock.kvstore.table.promises import Grant, Promises
from penstock.kvstore.table.table import BlockTable
from penstock.runtime.tasks import Failed


class Supplier(Protocol):
    """Blocks that can be brought into host memory."""

    @property
    def kind(self) -> TierKind:
        """Where the blocks are that it brings."""
        ...

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys it could bring. Cheap; for other stores it may be a guess."""
        ...

    async def bring_blocks(self, keys: Sequence[bytes], room: Room, until: float) -> int:
        """Fills slots of `room` with the blocks named, in order, verified; returns how many leading ones are stored.

        Stops early at a block that is damaged or gone, when the room is full, and at `until` of the monotonic clock;
        it does not raise for any of these. Also when cancelled it returns only when nothing writes into a slot that
        it has not committed: such slots are handed out again at once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What a lease says besides its keys."""

    session: str = ""
    """Digest of the session that asks; empty: unknown."""
    sources: Sequence[str] = ()
    """Addresses of stores that may have the blocks."""
    peer: bool = False
    """Another store asks: it gets what is here, so that no request goes in a circle."""
    namespace: bytes = b""
    """Of the tenant that asks; empty: unknown."""


class Tier(Protocol):
    """A place where blocks are. It is whole when it exists: opened by `async with`, at work until the end of that."""

    @property
    def kind(self) -> TierKind:
        """Which place it is; the nearest is asked first."""
        ...

    def suppliers(self, wish: Wish) -> Sequence[Supplier]:
        """Says who brings its blocks into host memory for a lease; empty when there is nothing to bring for this one.

        They are asked in their order.
        """
        ...

    def figures(self) -> Mapping[str, int | float]:
        """Numbers for metrics and the wire, by their names there."""
        ...


class KeepingTier(Tier, Protocol):
    """A tier of this store, which knows and decides what it keeps. It tells `Tiers` of each key that comes or goes.

    Before the first client it holds nothing, or the blocks of an earlier process.
    """

    @property
    def spec(self) -> KvSpec | None:
        """The spec of its blocks; None: it has none yet."""
        ...

    def has_blocks(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys it could give now."""
        ...

    def find_block(self, key: bytes) -> Block | None:
        """Returns a block that it has, for the caller to read and not to change; None: it has none of this key."""
        ...

    def stored_keys(self) -> Iterable[bytes]:
        """Lists the keys of all its blocks, for new subscribers."""
        ...

    def promise_blocks(self, keys: Sequence[bytes], seconds: float, namespace: bytes) -> Grant:
        """Promises to keep blocks, stored or still to come, as far as the tenant's budget here goes."""
        ...

    def renew_promises(self, keys: Sequence[bytes]) -> None:
        """Renews its promises of blocks that were used in any tier."""

    def touch_blocks(self, keys: Sequence[bytes], session: str) -> None:
        """Counts those of the blocks that it has as used by a client that had copies of them, and so asked for none."""

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """Passes a hint about the session's return to its eviction policy."""

    async def drop_tenant(self, namespace: bytes) -> Dropped:
        """Has all blocks of a tenant leave, promised ones too; nobody finds them any more. Those that are read stay
        where they are until then."""
        ...


@dataclass(frozen=True, slots=True)
class Dropped:
    """Blocks of a tenant that have left a tier."""

    kind: TierKind
    blocks: int = 0
    bytes: int = 0
    in_use: int = 0
    """Those of them whose place is free only when their readers are done."""
    coming: int = 0
    """Copies of others that were on their way into the tier."""


class Follower(Protocol):
    """What belongs to one spec, and goes over to another together with the store."""

    @property
    def busy(self) -> bool:
        """Whether a client reads or writes, or might still write, so that it can't be formatted now."""
        ...

    def format_for(self, spec: KvSpec) -> None:
        """Takes blocks of `spec` from now on, and no others. Not while it is `busy`."""


def added(parts: Sequence[Mapping[str, int | float]]) -> Mapping[str, int | float]:
    """The figures of several tiers of one kind as one's: sums; of what is 0 or 1, whether it is 1 anywhere."""
    names = dict.fromkeys(name for part in parts for name in part)
    together = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: max(values) if name in _FLAGS else sum(values) for name, values in together.items()}


_FLAGS = frozenset({"reading", "writing", "direct", "off"})


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that all tables of a store share."""

    now: Callable[[], float]
    """The clock of all tables; it does not go back."""
    epochs: Iterator[int]
    """Of host memory and device: never one twice."""
    policy: MakePolicy
    """Makes the eviction policy of a table."""
    promises: Callable[[int], Promises]
    """The promises of a tier of so many slots."""
    failed: Failed
    """Counts failures of background tasks."""


class Room:
    """Slots of the host tier for one bringing. `close` gives back the slots that were not committed."""

    def __init__(self, table: BlockTable, arena: Arena, now: Callable[[], float], landed: Callable[[], None]) -> None:
        """`landed` is called after each block that became findable."""
        self.block_bytes = table.block_bytes
        """Of each block."""
        self._table = table
        self._arena = arena
        self._now = now
        self._landed = landed
        self._mine: dict[bytes, Block] = {}
        self._unwanted = False
        """Its blocks' tenant was dropped."""

    def reserve(self, wanted: Wanted) -> Reserved:
        """A slot for a block. EXISTS: it is stored or being written by now, skip it. FULL: no slot is free, or nobody
        wants more, stop."""
        if self._unwanted:
            return Reserved(ReserveState.FULL)
        answer = self._table.puts.reserve_own(wanted, self._now())
        if answer.block is not None:
            self._mine[wanted.key] = answer.block
        return answer

    def view(self, block: Block) -> memoryview:
        """The bytes of a reserved block, writable. Release it, or drop it, before the bringing ends."""
        return self._arena.block(block.slot, self.block_bytes)

    def commit(self, block: Block, checksum: bytes) -> None:
        """Makes a block findable whose bytes are in place and verified, and pins it for the leases that wait for it."""
        del self._mine[block.key]
        self._table.puts.commit_own(Written(block.key, block.epoch, checksum), self._now())
        self._unwanted = self._unwanted or self._table.find(block.key) is not block
        self._landed()

    def give_back(self, block: Block) -> None:
        """The block will not come."""
        del self._mine[block.key]
        self._table.puts.commit_own(Written(block.key, block.epoch, b""), self._now())

    def close(self) -> None:
        """Gives back the slots that were not committed."""
        for block in list(self._mine.values()):
            self.give_back(block)
