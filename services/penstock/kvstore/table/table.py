"""The block table: pure state, no socket, no clock, no bytes.

Every call takes the current time, in seconds of any clock that does not go back. The cost of a call grows with
the blocks it names, never with what is stored.

A block is found only when it has been committed: reserved blocks live in a table of their own, which lookups
don't read. Every holding of a slot has an epoch that is never used twice, so a commit or a quarantine that
arrives late names a holding that is over, and is refused.

The hard case is a client that still *writes* when its reservation is over: it maps the memory, nothing can stop
its pen. Three things together make that harmless. A slot whose writer did not say "done" (its reservation ran
out, or its attachment ended) rests for `cooling_s` before somebody else gets it. The client looks at the slot's
epoch before each block it writes, so a late writer has at most one memcpy under way. And workers verify the
checksum of the copy that they made, not of the slot, so what slips through both, even a writer that stalled for longer
than `cooling_s`, is a quarantined block and a recompute, never a wrong token.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from penstock.errors import NotFound
from penstock.kv.hint import ReturnHint
from penstock.kvstore.eviction import SEVERAL
from penstock.kvstore.eviction.lru import Lru
from penstock.kvstore.table.blocks import (
    Attachment,
    Block,
    BlockPolicy,
    Lease,
    Reserved,
    State,
    StoreStats,
    Tier,
    Wanted,
    Written,
)
from penstock.kvstore.table.clock import Deadlines
from penstock.kvstore.table.promises import Grant, Retention
from penstock.kvstore.table.slots import Slots

TOGETHER_S = 1.0
"""Uses of a block within this time count as one: prefill stores what decode leases at once, for the same request."""


class Watcher(Protocol):
    """Hears of every change, at once and in order."""

    def stored(self, block: Block) -> None:
        """The block can be found from now on."""

    def removed(self, block: Block) -> None:
        """The block can't be found any more."""

    def holder(self, slot: int, epoch: int) -> None:
        """The slot is in the hands of `epoch` from now on; 0 is nobody. Called before anybody else gets it."""


class BlockStore:
    """All blocks of one size, who leases them and who is writing them."""

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        watcher: Watcher,
        *,
        policy: Callable[[], BlockPolicy] = Lru,
        retention: Retention | None = None,
        epochs: Iterator[int] | None = None,
        reserve_s: float = 10.0,
        cooling_s: float = 5.0,
    ) -> None:
        self.block_bytes = block_bytes
        self.reserve_s = reserve_s
        self._cooling_s = cooling_s
        self._watcher = watcher
        self._slots = Slots(slots, epochs)
        self._policy = policy()
        self._retention = Retention(0, 0, 0.0) if retention is None else retention
        self._blocks: dict[bytes, Block] = {}
        self._reserved: dict[bytes, Block] = {}
        self._detached = 0
        self._children: dict[bytes, int] = {}
        self._attachments: dict[str, Attachment] = {}
        self._house = Attachment("", "house")
        self._held = 0
        self._leaving: set[int] = set()
        """Epochs of victims that are held."""
        self._leases: dict[int, Lease] = {}
        self._lease_ids = itertools.count(1)
        self._tick = 0
        self._lease_ends: Deadlines[int] = Deadlines()
        self._reserve_ends: Deadlines[list[Block]] = Deadlines()
        self._cooling: deque[tuple[float, int]] = deque()  # in the order of their ends: all rest equally long
        self._hits = self._misses = self._puts = self._brought = self._evictions = self._quarantined = 0
        self._refused = self._expired_leases = self._expired_reservations = 0

    # -- attachments

    def attach(self, attachment_id: str, client: str) -> None:
        """Opens an attachment; ids are never used twice."""
        assert attachment_id not in self._attachments
        self._attachments[attachment_id] = Attachment(attachment_id, client)

    def detach(self, attachment_id: str, now: float) -> None:
        """Ends an attachment and takes back all that it owns."""
        attachment = self._attachments.pop(attachment_id)
        for lease in attachment.leases.values():
            self._end_lease(lease, now)
        for block in attachment.reserved.values():
            self._unreserve(block)
            self._rest(block, now)

    def attached(self, attachment_id: str) -> bool:
        """Whether there is such an attachment."""
        return attachment_id in self._attachments

    def _attachment(self, attachment_id: str) -> Attachment:
        attachment = self._attachments.get(attachment_id)
        if attachment is None:
            raise NotFound("no such attachment: attach first", field="attachment_id")
        return attachment

    # -- reading

    def keys(self) -> Iterable[bytes]:
        """All stored keys."""
        return self._blocks.keys()

    def find(self, key: bytes) -> Block | None:
        """A stored block; to be read, not changed."""
        return self._blocks.get(key)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored."""
        return len(list(itertools.takewhile(self._blocks.__contains__, keys)))

    def touch(self, key: bytes, session: str, now: float) -> bool:
        """Counts as a use, when the block is stored; whether it is."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._tick += 1
        self._use(block, session, now)
        self._offer(block)
        return True

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is stored."""
        return key in self._blocks

    def lease(
        self,
        attachment_id: str,
        keys: Sequence[bytes],
        seconds: float,
        now: float,
        session: str = "",
        *,
        grows: bool = False,
    ) -> Lease | None:
        """Pins the leading stored blocks for at most `seconds`; None when the first is not stored.

        A lease that `grows` is given also when nothing is found yet; `extend` it, and `settle` it at the end.
        """
        self.expire(now)
        attachment = self._attachment(attachment_id)
        found = self._blocks
        blocks = [found[key] for key in itertools.takewhile(found.__contains__, keys)]
        self._hits += len(blocks)
        if not grows:
            self._misses += len(keys) - len(blocks)
            if not blocks:
                return None
        self._pin(blocks, session, now)
        lease = Lease(next(self._lease_ids), attachment_id, blocks, now + seconds, session)
        attachment.leases[lease.lease_id] = self._leases[lease.lease_id] = lease
        self._lease_ends.add(lease.deadline, lease.lease_id)
        return lease

    def extend(self, lease: Lease, keys: Sequence[bytes], tier: Tier, now: float) -> int:
        """Pins those of `keys` that follow the lease's blocks and are stored by now; returns how many.

        `tier` is where they were before. Nothing happens to a lease that is over.
        """
        self.expire(now)
        if lease.lease_id not in self._leases:
            return 0
        first = at = len(lease.blocks)
        while at < len(keys) and (block := self._blocks.get(keys[at])) is not None:
            self._pin([block], lease.session, now)
            lease.blocks.append(block)
            at += 1
        self._hits += at - first
        if tier is not Tier.HOST:
            lease.brought.update(dict.fromkeys(range(first, at), tier))
        return at - first

    def settle(self, lease: Lease, asked: int, now: float) -> Lease | None:
        """Ends the growth of a lease that was to have `asked` blocks. None: nothing was found, or it is over."""
        self.expire(now)
        self._misses += asked - len(lease.blocks)
        if lease.lease_id not in self._leases:
            return None
        if not lease.blocks:
            self._release(self._attachments[lease.attachment], lease.lease_id, now)
            return None
        return lease

    def abandon(self, lease: Lease, now: float) -> None:
        """Gives a lease back that nobody will hear of; it may be over."""
        if lease.lease_id in self._leases:
            self._release(self._attachments[lease.attachment], lease.lease_id, now)

    def hold(self, key: bytes) -> Block | None:
        """Pins one stored block for the store's own use, until `drop`. Does not count as a use."""
        block = self._blocks.get(key)
        if block is not None:
            self._held += 1
            self._pin_one(block)
        return block

    def drop(self, block: Block, now: float) -> None:
        """Gives back what `hold` gave."""
        self._held -= 1
        self._unpin(block, now)

    def restore(self, blocks: Sequence[Block], now: float) -> None:
        """Fills an empty table with blocks that were stored before, the longest unused first. Nobody is told."""
        self._slots.restore(block.slot for block in blocks)
        for block in blocks:
            self._tick += 1
            block.used, block.used_at = self._tick, now
            self._blocks[block.key] = block
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
        for block in blocks:
            self._policy.stored(block)
        for block in blocks:
            self._offer(block)

    def hold_victim(self, now: float) -> Block | None:
        """Pins the block that would be evicted next, until `spare` or `discard`; None when none may go.

        Its parent may go from now on, as if it had left already. So the victims of several calls are those of as
        many evictions.
        """
        self.expire(now)
        victim = self._policy.victim()
        if victim is not None:
            self._held += 1
            self._pin_one(victim)
            self._leaving.add(victim.epoch)
            self._drop_child(victim.parent)
        return victim

    def spare(self, victim: Block, now: float) -> None:
        """The victim stays. Spare children before their parents."""
        if victim.epoch in self._leaving:
            self._leaving.remove(victim.epoch)
            self._add_child(victim.parent)
        self.drop(victim, now)

    def discard(self, victim: Block, now: float) -> bool:
        """Evicts the victim. False: somebody needs it by now, it was spared."""
        if victim.pins > 1 or victim.key in self._children or victim.epoch not in self._leaving:
            self.spare(victim, now)
            return False
        self._held -= 1
        victim.pins = 0
        self._evict(victim)
        return True

    def find_lease(self, attachment_id: str, lease_id: int, now: float) -> Lease:
        """A lease that still holds."""
        self.expire(now)
        lease = self._attachment(attachment_id).leases.get(lease_id)
        if lease is None:
            raise NotFound("no such lease, or it has expired", field="lease_id")
        return lease

    def release(self, attachment_id: str, lease_ids: Sequence[int], now: float) -> list[bool]:
        """Gives leases back. False: it had expired already."""
        self.expire(now)
        attachment = self._attachment(attachment_id)
        return [self._release(attachment, lease_id, now) for lease_id in lease_ids]

    def _release(self, attachment: Attachment, lease_id: int, now: float) -> bool:
        lease = attachment.leases.pop(lease_id, None)
        if lease is None:
            return False
        self._end_lease(lease, now)
        return True

    def _end_lease(self, lease: Lease, now: float) -> None:
        del self._leases[lease.lease_id]
        for block in lease.blocks:
            self._unpin(block, now)

    def _unpin(self, block: Block, now: float) -> None:
        block.pins -= 1
        if block.pins == 0:
            self._unpinned(block, now)

    def expect(self, session: str, outlook: ReturnHint) -> None:
        """What is known of a session's return; for the eviction policy."""
        self._policy.expect(session, outlook)

    def _unpinned(self, block: Block, now: float) -> None:
        if self._blocks.get(block.key) is block:
            self._offer(block)
        else:  # quarantined while it was leased
            self._detached -= 1
            self._rest(block, now)

    def _pin(self, blocks: Iterable[Block], session: str, now: float) -> None:
        self._tick += 1
        for block in blocks:
            self._pin_one(block)
            self._use(block, session, now)

    def _pin_one(self, block: Block) -> None:
        if block.pins == 0:
            self._policy.withdraw(block)
        block.pins += 1

    def _use(self, block: Block, session: str, now: float) -> None:
        block.used, block.used_at = self._tick, now
        if now - block.counted_at >= TOGETHER_S:
            block.uses += 1
            block.counted_at = now
        self._policy.used(block)
        if block.retained_until:
            self._retention.refresh([block.key], now)
            block.retained_until = self._retention.until(block.key)
        if session and session != block.session:
            block.session = SEVERAL if block.session else session

    # -- writing

    def reserve(self, attachment_id: str, wanted: Sequence[Wanted], now: float) -> list[Reserved]:
        """State for each block that is neither stored nor being stored, to be committed within `reserve_s`."""
        self.expire(now)
        attachment = self._attachment(attachment_id)
        self._tick += 1
        answers = [self._reserve(attachment, want, now) for want in wanted]
        mine = [answer.block for answer in answers if answer.block is not None]
        if mine:
            self._reserve_ends.add(now + self.reserve_s, mine)
        return answers

    def reserve_own(self, want: Wanted, now: float) -> Reserved:
        """A slot for a block that the store itself brings, until `commit_own`: nothing takes it back before."""
        self.expire(now)
        self._tick += 1
        return self._reserve(self._house, want, now)

    def commit_own(self, written: Written, now: float) -> bool:
        """As `commit`, of a block from `reserve_own`. A slot given back is reused at once: nobody may write to it."""
        self.expire(now)
        self._tick += 1
        return self._commit(self._house, written, now)

    def _reserve(self, attachment: Attachment, want: Wanted, now: float) -> Reserved:
        stored = self._blocks.get(want.key)
        if stored is not None:
            self._use(stored, want.session, now)
            self._offer(stored)
            return Reserved(State.EXISTS)
        if want.key in self._reserved:
            return Reserved(State.EXISTS)
        self._add_child(want.parent)
        if not self._make_room():
            self._drop_child(want.parent)
            return Reserved(State.FULL)
        slot, epoch = self._slots.take()
        parent = self._blocks.get(want.parent) or self._reserved.get(want.parent)
        block = Block(
            *(want.key, want.parent, want.first_token, slot, epoch, attachment.attachment_id),
            turn=parent.turn + (parent.uses > 0) if parent is not None else 0,
            used=self._tick,
            session=want.session,
            namespace=want.namespace,
            seconds=want.seconds,
        )
        self._reserved[want.key] = attachment.reserved[want.key] = block
        self._watcher.holder(slot, epoch)
        return Reserved(State.WRITE, block)

    def _make_room(self) -> bool:
        if not self._slots.available():
            victim = self._policy.victim()
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _evict(self, block: Block) -> None:
        self._evictions += 1
        self._unlist(block)
        self._free_slot(block)

    def find_reserved(self, attachment_id: str, key: bytes, epoch: int, now: float) -> Block | None:
        """The attachment's reservation, while it is in time."""
        self.expire(now)
        block = self._attachment(attachment_id).reserved.get(key)
        return block if block is not None and block.epoch == epoch else None

    def commit(self, attachment_id: str, written: Sequence[Written], now: float) -> list[bool]:
        """Makes reserved blocks findable, or gives them back. False: the reservation was no longer yours."""
        self.expire(now)
        attachment = self._attachment(attachment_id)
        self._tick += 1
        return [self._commit(attachment, one, now) for one in written]

    def _commit(self, attachment: Attachment, written: Written, now: float) -> bool:
        block = attachment.reserved.get(written.key)
        if block is None or block.epoch != written.epoch:
            self._refused += 1
            return False
        if not written.checksum:
            del attachment.reserved[block.key]
            self._unreserve(block)
            self._free_slot(block)
            return True
        del attachment.reserved[block.key], self._reserved[block.key]
        block.checksum = written.checksum
        block.used, block.used_at, block.counted_at = self._tick, now, now
        block.retained_until = self._retention.until(block.key)
        self._blocks[block.key] = block
        self._policy.stored(block)
        self._puts += attachment is not self._house
        self._brought += attachment is self._house
        self._offer(block)
        self._watcher.stored(block)
        return True

    def _unreserve(self, block: Block) -> None:
        del self._reserved[block.key]
        self._drop_child(block.parent)

    # -- promises

    def retain(self, attachment_id: str, keys: Sequence[bytes], seconds: float, namespace: bytes, now: float) -> Grant:
        """Promises to keep blocks, stored or still to come, as far as the tenant's budget goes."""
        self._attachment(attachment_id)
        return self.promise(keys, seconds, namespace, now)

    def promise(self, keys: Sequence[bytes], seconds: float, namespace: bytes, now: float) -> Grant:
        """As `retain`, for an attachment that another table knows."""
        self.expire(now)
        grant = self._retention.grant(namespace, keys, seconds, now)
        self._keep(keys[: grant.blocks])
        return grant

    def promised_until(self, key: bytes) -> float:
        """Until when a block was promised to stay, stored or not; 0: it was not."""
        return self._retention.until(key)

    def renew(self, keys: Sequence[bytes], now: float) -> None:
        """These blocks were used, if not here: what was promised of them is promised anew."""
        if len(self._retention):
            self._retention.refresh(keys, now)
            self._keep(keys)

    def _keep(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and (until := self._retention.until(key)) != block.retained_until:
                block.retained_until = until
                self._offer(block)

    # -- removal

    def quarantine(self, attachment_id: str, key: bytes, epoch: int, now: float) -> bool:
        """Takes a block out of service. False: it is not, or no longer, that block."""
        self._attachment(attachment_id)
        return self.condemn(key, epoch, now)

    def condemn(self, key: bytes, epoch: int, now: float) -> bool:
        """As `quarantine`, when the store itself finds out."""
        block = self._blocks.get(key)
        if block is None or block.epoch != epoch:
            return False
        self._quarantined += 1
        self._policy.withdraw(block)
        self._unlist(block)
        if block.pins:
            self._detached += 1
        else:  # its bytes changed after the commit: whoever did that may not be done
            self._rest(block, now)
        return True

    def _unlist(self, block: Block) -> None:
        del self._blocks[block.key]
        self._policy.removed(block)
        if block.epoch in self._leaving:
            self._leaving.remove(block.epoch)
        else:
            self._drop_child(block.parent)
        self._watcher.removed(block)

    def _free_slot(self, block: Block) -> None:
        self._watcher.holder(block.slot, 0)
        self._slots.give(block.slot)

    def _rest(self, block: Block, now: float) -> None:
        self._watcher.holder(block.slot, 0)
        self._slots.cool()
        self._cooling.append((now + self._cooling_s, block.slot))

    # -- the prefix tree

    def _add_child(self, parent: bytes) -> None:
        self._children[parent] = self._children.get(parent, 0) + 1
        block = self._blocks.get(parent)
        if block is not None:
            self._policy.withdraw(block)

    def _drop_child(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        block = self._blocks.get(parent)
        if block is not None:
            self._offer(block)

    def _offer(self, block: Block) -> None:
        if block.pins == 0 and block.key not in self._children:
            self._policy.offer(block)

    # -- time

    def next_deadline(self) -> float | None:
        """When `expire` has something to do again, at the earliest."""
        ends = [self._lease_ends.first(), self._reserve_ends.first(), self._cooling[0][0] if self._cooling else None]
        return min((end for end in ends if end is not None), default=None)

    def expire(self, now: float) -> None:
        """Takes back what is over."""
        while self._cooling and self._cooling[0][0] <= now:
            self._slots.warm(self._cooling.popleft()[1])
        self._retention.expire(now)
        for lease_id in self._lease_ends.due(now):
            lease = self._leases.get(lease_id)
            if lease is not None:
                self._expired_leases += 1
                self._release(self._attachments[lease.attachment], lease_id, now)
        for blocks in self._reserve_ends.due(now):
            for block in blocks:
                self._expire_reserved(block, now)

    def _expire_reserved(self, block: Block, now: float) -> None:
        if self._reserved.get(block.key) is block:
            self._expired_reservations += 1
            del self._attachments[block.owner].reserved[block.key]
            self._unreserve(block)
            self._rest(block, now)

    # -- figures

    @property
    def free(self) -> int:
        """Slots that can be had without evicting anything."""
        return self._slots.free

    @property
    def frontier(self) -> int:
        """The first slot that nobody ever held."""
        return self._slots.frontier

    @property
    def idle(self) -> bool:
        """Nobody reads or writes, nor might still write."""
        return not self._attachments and not self._cooling and not self._held and not self._house.reserved

    def fruitless(self, least: int) -> bool:
        """Whether at least so many blocks were stored and missed, and not one was found."""
        return self._hits == 0 and self._puts >= least and self._misses >= least

    def stats(self) -> StoreStats:
        """A consistent snapshot."""
        return StoreStats(
            slots=self._slots.count,
            blocks=len(self._blocks),
            reserved=len(self._reserved),
            detached=self._detached,
            cooling=self._slots.cooling,
            used_bytes=self._slots.held * self.block_bytes,
            leases=len(self._leases),
            attachments=len(self._attachments),
            hits=self._hits,
            misses=self._misses,
            puts=self._puts,
            brought=self._brought,
            evictions=self._evictions,
            quarantined=self._quarantined,
            refused_commits=self._refused,
            expired_leases=self._expired_leases,
            expired_reservations=self._expired_reservations,
            retained=len(self._retention),
        )
