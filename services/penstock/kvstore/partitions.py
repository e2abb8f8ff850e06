"""The partitions of a store: the blocks of several specs side by side, each in a part of every tier of its own.

A client belongs to the partition of its spec. A new spec takes an empty partition; when there is none, the one that has
been without clients for longest, whose blocks in memory are forgotten while those on the disk stay. When clients are
attached to all, the spec is refused. What is stored in one partition evicts nothing of another. Draft models have
partitions of their own, in host memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from penstock.errors import Overloaded, Refused
from penstock.kv.spec import KvSpec
from penstock.kvstore.claiming import ClaimDesk
from penstock.kvstore.elsewhere.tier import Elsewhere
from penstock.kvstore.store import Store
from penstock.kvstore.table.blocks import Block, TableStats, TierKind
from penstock.kvstore.tiers.base import Dropped
from penstock.kvstore.tiers.device.messages import NoDeviceFace
from penstock.kvstore.tiers.device.tier import DeviceTier
from penstock.kvstore.tiers.disk.opening import Disk
from penstock.kvstore.tiers.host import HostTier
from penstock.runtime.metrics import PartitionFigures

_MOST_LOOKS = 16
"""For blocks of a tenant that is dropped: each finds what the one before has missed, which is less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """The blocks of one spec at a time."""

    number: int
    """From 0; it stays, whoever uses the partition."""
    store: Store
    host: HostTier
    elsewhere: Elsewhere
    device: NoDeviceFace
    """The device as its clients meet it."""
    desk: ClaimDesk
    disk: Disk | None = None
    """Of a store that has a disk."""
    gpu: DeviceTier | None = None
    """Of a store that has a device."""
    draft: bool = False
    """Whether it is for draft models."""

    @property
    def specs(self) -> list[KvSpec]:
        """The spec of its clients; before the first one, that whose blocks a slower tier has from an earlier life."""
        if self.store.spec is not None:
            return [self.store.spec]
        return [tier.spec for tier in self.store.tiers.kept if tier.spec is not None]

    def figures(self) -> PartitionFigures:
        """Of its host memory, for metrics."""
        stats = self.store.stats()
        return PartitionFigures(
            model=self.specs[0].model if self.specs else "",
            slots=stats.slots,
            blocks=stats.blocks,
            hits=stats.hits,
            misses=stats.misses,
            evictions=stats.evictions,
            attachments=stats.attachments,
        )

    @property
    def attached(self) -> int:
        """Clients that are attached."""
        return self.store.stats().attachments

    def find(self, key: bytes) -> tuple[TierKind, Block, int] | None:
        """Finds a block, the nearest tier that has it, and its tokens."""
        found = self.store.tiers.find(key)
        return None if found is None else (*found, self.specs[0].block_size)


class Partitions:
    """All partitions of a store. Belongs to one event loop."""

    def __init__(self, parts: Sequence[Partition], max_clients: int) -> None:
        self._parts = list(parts)
        """The longest unused first."""
        self._max_clients = max_clients
        self._of: dict[str, Partition] = {}
        """By attachment."""

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._parts)

    # -- attachments

    def attach(self, client: str, spec: KvSpec, *, peer: bool = False, draft: bool = False) -> tuple[str, Partition]:
        """A new attachment's id, and its partition. A `peer` only reads, so no partition is emptied for it; `draft`:
        the spec is that of a draft model.

        Raises Refused, Overloaded, Unavailable.
        """
        if len(self._of) >= self._max_clients:
            raise Overloaded(f"{self._max_clients} clients are attached already", retry_after=5.0)
        part = self._for(spec, draft)
        attachment_id = part.store.attach(client, spec, peer=peer)
        self._of[attachment_id] = part
        self._used(part)
        return attachment_id, part

    def detach(self, attachment_id: str, client: str) -> None:
        """Takes back all that the attachment owns."""
        part = self._of.pop(attachment_id)
        part.device.detach(attachment_id)
        part.store.detach(attachment_id, client)
        self._used(part)

    def of(self, attachment_id: str) -> Partition:
        """The partition of an attachment. One that there is not is nobody's: whichever partition is asked says so."""
        return self._of.get(attachment_id) or self._parts[0]

    def _used(self, part: Partition) -> None:
        self._parts.remove(part)
        self._parts.append(part)

    def _for(self, spec: KvSpec, draft: bool) -> Partition:
        """The partition that has this spec, or may take it. Raises Refused."""
        parts = [part for part in self._parts if part.draft == draft]
        if not parts:
            raise Refused("the store keeps no blocks of draft models; one with --draft-bytes does")
        for part in parts:
            if spec in part.specs:
                return part
        free = [part for part in parts if not part.attached]
        if not free and len(parts) > 1:
            most = max((part.specs[0] for part in parts), key=lambda other: _alike(other, spec))
            raise Refused(
                f"all {len(parts)} partitions of the store are in use with other KV specs, and of the nearest "
                f"{most.difference(spec)}; a store with more partitions serves more models"
            )
        return next((part for part in free if not part.specs), (free or parts)[0])

    # -- blocks

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored; those of one chain are in one partition."""
        return max(part.store.lookup(keys) for part in self._parts)

    def concerned(self, keys: Sequence[bytes]) -> Partition:
        """The partition of blocks that are stored, or that somebody computes; any one when there is none."""
        for part in self._parts:
            if part.store.claims.knows(keys) or part.store.lookup(keys[:1]):
                return part
        return self._parts[0]

    def find(self, key: bytes) -> tuple[TierKind, Block, int] | None:
        """Finds a block, the nearest tier that has it, and its tokens."""
        return next((found for part in self._parts if (found := part.find(key)) is not None), None)

    def keys(self) -> Iterable[bytes]:
        """All that can be found."""
        for part in self._parts:
            yield from part.store.tiers.keys()

    async def drop_tenant(self, namespace: bytes) -> list[Dropped]:
        """Has the blocks of a tenant leave all tiers; what each had. Raises Unavailable when a pool keeps them."""
        found: dict[TierKind, Dropped] = {}
        for part in list(self._parts):
            dropped = await self._drop_kept(part, namespace)
            for new in (*dropped, *await part.elsewhere.drop_tenant(namespace)):
                kind, old = new.kind, found.get(new.kind, Dropped(new.kind))
                found[kind] = Dropped(kind, old.blocks + new.blocks, old.bytes + new.bytes, old.in_use + new.in_use)
        return [found[kind] for kind in sorted(found)]

    async def _drop_kept(self, part: Partition, namespace: bytes) -> list[Dropped]:
        """Has the blocks leave the tiers of a partition, and again as long as some are found: a block that is copied
        from one tier to another while these are looked through would else be missed in both."""
        found: list[Dropped] = []
        for _ in range(_MOST_LOOKS):
            new = [await tier.drop_tenant(namespace) for tier in list(part.store.tiers.kept)]
            found += new
            if not any(dropped.blocks or dropped.coming for dropped in new):
                break
        return found

    # -- all of them

    def figures(self) -> dict[int, PartitionFigures]:
        """Of each, by its number."""
        return {part.number: part.figures() for part in sorted(self._parts, key=attrgetter("number"))}

    async def stop(self) -> None:
        """Ends all attachments, subscriptions, claims and bringings; their streams return."""
        for part in self._parts:
            part.store.closing.set()
        for part in self._parts:
            await part.store.stop()

    @property
    def of_models(self) -> Sequence[Partition]:
        """Those that are not for drafts."""
        return [part for part in self._parts if not part.draft]

    def stats(self) -> TableStats:
        """The figures of host memory, but for drafts."""
        return total(part.store.stats() for part in self.of_models)


def total(stats: Iterable[TableStats]) -> TableStats:
    """The figures of several tables as one's."""
    every = list(stats)
    return TableStats(**{field.name: sum(getattr(one, field.name) for one in every) for field in fields(TableStats)})


def _alike(one: KvSpec, other: KvSpec) -> int:
    return sum(getattr(one, field.name) == getattr(other, field.name) for field in fields(KvSpec))
