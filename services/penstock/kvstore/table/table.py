"""The block table: pure state, no socket, no clock, no bytes.

Every call takes the current time, in seconds of any clock that does not go back. The cost of a call grows with
the blocks it names, never with what is stored.

A block is found only when it has been committed: reserved blocks live in a table of their own, which lookups
don't read. Every holding of a slot has an epoch that is never used twice, so a commit or a quarantine that
arrives late names a holding that is over, and is refused.

The hard case is a client that still *writes* when its reservation is over: it maps the memory, nothing can stop
its pen. Three things together make that harmless. A slot whose writer did not say "done" (its reservation ran
out, or its attachment ended) rests for `cooling_s` before it gets another holder. The client looks at the slot's
epoch before each block it writes, so a late writer has at most one memcpy under way. And workers verify the
checksum of the copy that they made, not of the slot, so what slips through both, even a writer that stalled for longer
than `cooling_s`, is a quarantined block and a recompute, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.kv.eviction.lru import Lru
from penstock.kv.hint import ReturnHint
from penstock.kvstore.table.attachments import Attachments
from penstock.kvstore.table.blocks import Block, MakePolicy, TableStats
from penstock.kvstore.table.clock import Wake, asleep
from penstock.kvstore.table.leases import Leases
from penstock.kvstore.table.promises import Grant, Promises
from penstock.kvstore.table.puts import Puts
from penstock.kvstore.table.shelf import Shelf, Watcher
from penstock.kvstore.table.slots import Slots
from penstock.kvstore.table.tree import without_circles
from penstock.kvstore.table.victims import Victims


class BlockTable:
    """All blocks of one size, their leases and their writers: see `leases`, `puts` and `victims`.

    `wake` is called with the time of what ends by itself, whenever it comes before everything that ends so: call
    `expire` then, and `next_end` for the following one. Without that nothing is wrong, only late.
    """

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        watcher: Watcher,
        *,
        policy: MakePolicy = Lru,
        promises: Promises | None = None,
        epochs: Iterator[int] | None = None,
        reserve_s: float = 10.0,
        cooling_s: float = 5.0,
        wake: Wake = asleep,
    ) -> None:
        self.block_bytes = block_bytes
        self.slots = Slots(slots, epochs, wake)
        self._promises = Promises(0, 0, 0.0) if promises is None else promises
        self.attachments = Attachments()
        self._shelf = Shelf(self.slots, watcher, policy=policy(), promises=self._promises, cooling_s=cooling_s)
        self.leases = Leases(self._shelf, self.attachments, expire=self.expire, wake=wake)
        self.puts = Puts(self._shelf, self.attachments, reserve_s=reserve_s, expire=self.expire, wake=wake)
        self.victims = Victims(self._shelf, expire=self.expire)

    # -- attachments

    def attach(self, attachment_id: str, client: str) -> None:
        """A client has attached; ids are never used twice."""
        self.attachments.add(attachment_id, client)

    def detach(self, attachment_id: str, now: float) -> None:
        """Ends an attachment and takes back all that it owns."""
        attachment = self.attachments.pop(attachment_id)
        self.leases.release_all(attachment, now)
        self.puts.take_back_all(attachment, now)

    # -- finding

    def __contains__(self, key: bytes) -> bool:
        return key in self._shelf

    def keys(self) -> Iterable[bytes]:
        """All stored keys."""
        return self._shelf.keys()

    def find(self, key: bytes) -> Block | None:
        """A stored block; to be read, not changed."""
        return self._shelf.find(key)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored."""
        return len(self._shelf.leading(keys))

    # -- what the store itself does with blocks

    def touch(self, key: bytes, session: str, now: float) -> bool:
        """Counts as a use, when the block is stored; whether it is."""
        block = self._shelf.find(key)
        if block is None:
            return False
        self._shelf.tick += 1
        self._shelf.use(block, session, now)
        self._shelf.offer(block)
        return True

    def touch_all(self, keys: Iterable[bytes], session: str, now: float) -> list[Block]:
        """Counts as one use of those of the blocks that are stored; returns these."""
        self._shelf.tick += 1
        found = [block for key in keys if (block := self._shelf.find(key)) is not None]
        for block in found:
            self._shelf.use(block, session, now)
            self._shelf.offer(block)
        return found

    def hold(self, key: bytes) -> Block | None:
        """Pins one stored block for the store's own use, until `drop`. Does not count as a use."""
        block = self._shelf.find(key)
        if block is not None:
            self._shelf.held += 1
            self._shelf.pin(block)
        return block

    def drop(self, block: Block, now: float) -> None:
        """Gives back a pin of `hold`."""
        self._shelf.held -= 1
        self._shelf.unpin(block, now)

    def restore(self, blocks: Sequence[Block], now: float) -> None:
        """Fills an empty table with blocks that were stored before, the longest unused first. No watcher hears of it.

        Those that are their own ancestors are left out: they could never leave.
        """
        self._shelf.restore(without_circles(blocks), now)

    def expect_session(self, session: str, hint: ReturnHint) -> None:
        """Passes a hint about the session's return to the eviction policy."""
        self._shelf.policy.expect_session(session, hint)

    # -- promises

    def promise(self, keys: Sequence[bytes], seconds: float, namespace: bytes, now: float) -> Grant:
        """Promises to keep blocks, stored or still to come, as far as the tenant's budget goes."""
        self.expire(now)
        grant = self._promises.grant(namespace, keys, seconds, now)
        self._keep(keys[: grant.blocks])
        return grant

    def promised_until(self, key: bytes) -> float:
        """Until when a block was promised to stay, stored or not; 0: it was not."""
        return self._promises.until(key)

    def renew(self, keys: Sequence[bytes], now: float) -> None:
        """These blocks were used, if not here: renews their promises."""
        if len(self._promises):
            self._promises.refresh(keys, now)
            self._keep(keys)

    def _keep(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            block = self._shelf.find(key)
            if block is not None and (until := self._promises.until(key)) != block.retained_until:
                block.retained_until = until
                self._shelf.offer(block)

    # -- removal

    def quarantine(self, attachment_id: str, key: bytes, epoch: int, now: float) -> bool:
        """Takes a block out of service that a client found wrong. False: it is not, or no longer, that block."""
        self.attachments.of(attachment_id)
        return self.condemn(key, epoch, now)

    def condemn(self, key: bytes, epoch: int, now: float) -> bool:
        """As `quarantine`, when the store itself finds out."""
        block = self._shelf.find(key)
        if block is None or block.epoch != epoch:
            return False
        self._shelf.condemn(block, now)
        return True

    def discard(self, key: bytes) -> Block | None:
        """Takes a stored block out of service; None: there is none. Readers keep its bytes until they are done."""
        block = self._shelf.find(key)
        if block is not None:
            self._shelf.discard(block)
        return block

    # -- time

    def next_end(self) -> float | None:
        """When `expire` has something to do again, at the earliest."""
        ends = (self.leases.next_end(), self.puts.next_end(), self.slots.rested())
        return min((end for end in ends if end is not None), default=None)

    def expire(self, now: float) -> None:
        """Takes back the leases, reservations and promises whose time is over."""
        self.slots.expire(now)
        self._promises.expire(now)
        self.leases.expire(now)
        self.puts.expire(now)

    # -- figures

    @property
    def idle(self) -> bool:
        """Whether no client reads or writes, or might still write."""
        return not (len(self.attachments) or self.slots.resting or self._shelf.held or self.puts.own)

    def stats(self) -> TableStats:
        """A consistent snapshot."""
        return TableStats(
            slots=self.slots.count,
            blocks=len(self._shelf),
            reserved=len(self.puts),
            detached=self._shelf.detached,
            cooling=self.slots.resting,
            used_bytes=self.slots.held * self.block_bytes,
            leases=len(self.leases),
            attachments=len(self.attachments),
            hits=self.leases.hits,
            misses=self.leases.misses,
            puts=self.puts.stored,
            brought=self.puts.brought,
            evictions=self._shelf.evictions,
            quarantined=self._shelf.quarantined,
            refused_commits=self.puts.refused,
            expired_leases=self.leases.expired,
            expired_reservations=self.puts.expired,
            retained=len(self._promises),
        )
