"""Blocks on their way in: reserved, written, committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import InvalidRequest
from penstock.kvstore.table.attachments import Attachments
from penstock.kvstore.table.blocks import Attachment, Block, Reserved, ReserveState, Wanted, Written
from penstock.kvstore.table.clock import Deadlines, Wake
from penstock.kvstore.table.shelf import Shelf
from penstock.kvstore.table.tree import circle

_PART, _ANY = 4, 1024
"""One client may have reserved one part in so many of all blocks, and in any case so many, which is no burst of a small
store's worker: who reserves and writes nothing pushes out no more than that."""


class Puts:
    """All reservations of one table, those of clients and its own; `expire` is the table's."""

    def __init__(
        self,
        shelf: Shelf,
        attachments: Attachments,
        *,
        reserve_s: float,
        expire: Callable[[float], None],
        wake: Wake,
    ) -> None:
        self.reserve_s = reserve_s
        """How long a client may take from reserving to committing."""
        self.stored = self.brought = self.refused = self.expired = 0
        """Blocks that clients stored; that the store brought; commits refused; reservations not committed in time."""
        self._shelf = shelf
        self._attachments = attachments
        self._expire_all = expire
        self._reserved: dict[bytes, Block] = {}
        self._house = Attachment("", "house")
        """Owns what the store itself brings."""
        self._unwanted: set[int] = set()
        """Epochs of what the house has reserved, and nobody wants any more."""
        self._ends: Deadlines[list[Block]] = Deadlines(wake)
        self._most_reserved = max(shelf.room // _PART, _ANY)
        """Blocks that one client may have reserved and not written."""

    def __len__(self) -> int:
        return len(self._reserved)

    @property
    def own(self) -> int:
        """Reservations of the store itself."""
        return len(self._house.reserved)

    # -- for clients

    def reserve(self, attachment_id: str, wanted: Sequence[Wanted], now: float) -> list[Reserved]:
        """A state for each block: WRITE when it is neither stored nor being stored, to be committed in `reserve_s`;
        FULL when there is no room for it, or for its parent: what can't be reached pushes nothing out.

        Raises InvalidRequest, before anything is reserved, when a block would follow itself.
        """
        self._expire_all(now)
        attachment = self._attachments.of(attachment_id)
        wrong = self._circle(wanted)
        if wrong is not None:
            raise InvalidRequest("the block would be its own ancestor", field=f"blocks[{wrong}].parent")
        self._shelf.tick += 1
        answers: list[Reserved] = []
        left_out: set[bytes] = set()
        for want in wanted:
            answers.append(self._reserve(attachment, want, now, follows=want.parent not in left_out))
            if answers[-1].state is ReserveState.FULL:
                left_out.add(want.key)
        mine = [answer.block for answer in answers if answer.block is not None]
        if mine:
            self._ends.add(now + self.reserve_s, mine)
        return answers

    def find(self, attachment_id: str, key: bytes, epoch: int, now: float) -> Block | None:
        """The attachment's reservation, while it is in time."""
        self._expire_all(now)
        block = self._attachments.of(attachment_id).reserved.get(key)
        return block if block is not None and block.epoch == epoch else None

    def commit(self, attachment_id: str, written: Sequence[Written], now: float) -> list[bool]:
        """Makes reserved blocks findable, or gives them back. False: the reservation was no longer yours."""
        self._expire_all(now)
        attachment = self._attachments.of(attachment_id)
        self._shelf.tick += 1
        return [self._commit(attachment, one, now) for one in written]

    # -- for the store itself

    def reserve_own(self, want: Wanted, now: float) -> Reserved:
        """A slot for a block that the store itself brings, until `commit_own`: nothing takes it back before.

        A block that would follow itself gets none.
        """
        self._expire_all(now)
        self._shelf.tick += 1
        if self._circle([want]) is not None:
            return Reserved(ReserveState.FULL)
        return self._reserve(self._house, want, now)

    def commit_own(self, written: Written, now: float) -> bool:
        """As `commit`, of a block from `reserve_own`. A slot given back is reused at once: its writer has ended."""
        self._expire_all(now)
        self._shelf.tick += 1
        return self._commit(self._house, written, now)

    def unwant(self, namespace: bytes) -> int:
        """What the store itself is bringing of a tenant is given back when it is committed; how many more blocks."""
        known = len(self._unwanted)
        self._unwanted.update(block.epoch for block in self._house.reserved.values() if block.namespace == namespace)
        return len(self._unwanted) - known

    # -- both

    def _circle(self, wanted: Sequence[Wanted]) -> int | None:
        tree = self._shelf.tree
        leaving = bool(self._shelf.leaving)  # those are not counted as children, and may stay
        return circle(((want.key, want.parent) for want in wanted), self._parent_of, lambda key: leaving or key in tree)

    def _parent_of(self, key: bytes) -> bytes | None:
        block = self._shelf.find(key) or self._reserved.get(key)
        return block.parent if block is not None else None

    def _reserve(self, attachment: Attachment, want: Wanted, now: float, *, follows: bool = True) -> Reserved:
        """`follows`: its parent is not one of those that found no room."""
        stored = self._shelf.find(want.key)
        if stored is not None:
            self._shelf.use(stored, want.session, now)
            self._shelf.offer(stored)
            return Reserved(ReserveState.EXISTS)
        if want.key in self._reserved:
            return Reserved(ReserveState.EXISTS)
        if not follows or (attachment is not self._house and len(attachment.reserved) >= self._most_reserved):
            return Reserved(ReserveState.FULL)
        self._shelf.add_child(want.parent)
        place = self._shelf.take_slot()
        if place is None:
            self._shelf.drop_child(want.parent)
            return Reserved(ReserveState.FULL)
        parent = self._shelf.find(want.parent) or self._reserved.get(want.parent)
        block = Block(
            key=want.key,
            parent=want.parent,
            first_token=want.first_token,
            slot=place[0],
            epoch=place[1],
            owner=attachment.attachment_id,
            turn=parent.turn + (parent.uses > 0) if parent is not None else 0,
            used=self._shelf.tick,
            session=want.session,
            namespace=want.namespace,
            seconds=want.seconds,
        )
        self._reserved[want.key] = attachment.reserved[want.key] = block
        return Reserved(ReserveState.WRITE, block)

    def _commit(self, attachment: Attachment, written: Written, now: float) -> bool:
        block = attachment.reserved.get(written.key)
        if block is None or block.epoch != written.epoch:
            self.refused += 1
            return False
        self._forget(attachment, block)
        unwanted = block.epoch in self._unwanted
        self._unwanted.discard(block.epoch)
        if unwanted or not written.checksum:
            self._shelf.drop_child(block.parent)
            self._shelf.free(block)
            return True
        block.checksum = written.checksum
        self._shelf.enlist(block, now)
        self.stored += attachment is not self._house
        self.brought += attachment is self._house
        return True

    def _forget(self, attachment: Attachment, block: Block) -> None:
        del attachment.reserved[block.key], self._reserved[block.key]

    # -- time

    def take_back_all(self, attachment: Attachment, now: float) -> None:
        """Ends the reservations of an attachment, which has ended; it may still be writing."""
        for block in list(attachment.reserved.values()):
            self._take_back(attachment, block, now)

    def _take_back(self, attachment: Attachment, block: Block, now: float) -> None:
        self._forget(attachment, block)
        self._shelf.drop_child(block.parent)
        self._shelf.rest(block, now)

    def next_end(self) -> float | None:
        """When the next reservation may end by itself."""
        return self._ends.first()

    def expire(self, now: float) -> None:
        """Takes back the reservations that were not committed in time."""
        for blocks in self._ends.due(now):
            for block in blocks:
                if self._reserved.get(block.key) is block:
                    self.expired += 1
                    self._take_back(self._attachments.of(block.owner), block, now)
