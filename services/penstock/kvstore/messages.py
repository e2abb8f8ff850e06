"""The store's data to and from messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from penstock.kv.bounds import check_key, check_namespace, keys_of
from penstock.kv.bytes.arena import ARENA_ID_BYTES, EPOCHS_AT, Layout
from penstock.kv.bytes.checksum import CHECKSUM_BYTES
from penstock.kv.identity import MAX_BATCH
from penstock.kv.pace import Pace
from penstock.kv.spec import spec_to_message
from penstock.kvstore.checks import check_checksum
from penstock.kvstore.events.messages import tier_message
from penstock.kvstore.partitions import Partition, Partitions
from penstock.kvstore.sessions import SessionPhase, SessionTable
from penstock.kvstore.table.blocks import Block, Lease, TierKind, Wanted, Written
from penstock.kvstore.tiers.lent import PagesAt
from penstock.rpc.bounds import bad, check_count, check_length, check_seconds, check_session
from penstock.v1 import common_pb2, kvstore_pb2

_MEMORY = re.compile(r"/proc/[0-9]{1,9}/fd/[0-9]{1,9}")
_MOST_PAGES = 1 << 24
_MOST_BEHIND = 64


def wanted_from_message(request: kvstore_pb2.ReserveRequest) -> list[Wanted]:
    """The checked blocks of a request."""
    check_session("session", request.session)
    check_namespace("namespace", request.namespace)
    return [_wanted(f"blocks[{at}]", block, request) for at, block in enumerate(request.blocks)]


def _wanted(field: str, block: kvstore_pb2.ReserveBlock, request: kvstore_pb2.ReserveRequest) -> Wanted:
    check_key(f"{field}.key", block.key)
    check_key(f"{field}.parent", block.parent)
    check_seconds(f"{field}.seconds", block.seconds)
    return Wanted(block.key, block.parent, block.first_token, block.seconds, request.session, request.namespace)


def touched_from_message(request: kvstore_pb2.TouchRequest) -> list[tuple[str, list[bytes]]]:
    """The checked sessions of a request and the keys that each has used."""
    used = []
    for at, one in enumerate(request.used):
        check_session(f"used[{at}].session", one.session)
        used.append((one.session, keys_of(f"used[{at}].keys", one.keys, most=MAX_BATCH)))
    check_count("used", [key for _, keys in used for key in keys], MAX_BATCH)
    return used


def written_from_message(field: str, block: kvstore_pb2.CommitBlock) -> Written:
    """A checked Written; `field` is its place in the request."""
    check_key(f"{field}.key", block.key)
    check_checksum(f"{field}.checksum", block.checksum)
    return Written(block.key, block.epoch, block.checksum)


def lent_from_message(request: kvstore_pb2.LendRequest) -> list[tuple[Block, int]]:
    """The checked blocks of a request, each with the offset of its page."""
    check_session("session", request.session)
    check_namespace("namespace", request.namespace)
    return [(_lent(f"blocks[{at}]", block, request), block.offset) for at, block in enumerate(request.blocks)]


def _lent(field: str, block: kvstore_pb2.LentBlock, request: kvstore_pb2.LendRequest) -> Block:
    check_key(f"{field}.key", block.key)
    check_key(f"{field}.parent", block.parent)
    check_seconds(f"{field}.seconds", block.seconds)
    check_length(f"{field}.checksum", block.checksum, CHECKSUM_BYTES)
    if not block.epoch:
        raise bad(f"{field}.epoch", "0", "must be that of the page")
    return Block(
        key=block.key,
        parent=block.parent,
        first_token=block.first_token,
        slot=0,
        epoch=block.epoch,
        owner=request.attachment_id,
        checksum=block.checksum,
        behind=block.behind,
        session=request.session,
        namespace=request.namespace,
        seconds=block.seconds,
    )


def pages_from_message(pages: kvstore_pb2.ClientPages) -> PagesAt:
    """Where a client's pages lie: in a file that only its memory can be."""
    if not _MEMORY.fullmatch(pages.path):
        raise bad("pages.path", repr(pages.path[:64]), "must be /proc/PID/fd/N")
    check_length("pages.id", pages.id, ARENA_ID_BYTES)
    if pages.epochs_at != EPOCHS_AT or not 0 < pages.slots <= _MOST_PAGES:
        raise bad("pages.slots", str(pages.slots), f"must be 1 to {_MOST_PAGES}, behind their epochs")
    layout = Layout.gapless(pages.slots, pages.slot_stride)
    if pages.slots_at != layout.slots_at or not 0 < pages.bytes == layout.offset(pages.slots):
        raise bad("pages.bytes", str(pages.bytes), "must be those of the pages and their epochs")
    if pages.behind > _MOST_BEHIND:
        raise bad("pages.behind", str(pages.behind), f"must be at most {_MOST_BEHIND} bytes")
    return PagesAt(pages.path, pages.bytes, pages.id, layout, pages.behind)


def pace_from_message(field: str, pace: kvstore_pb2.Pace) -> Pace:
    """A checked Pace; `field` is its place in the request."""
    for name in ("queue_s", "block_s", "growth_s"):
        check_seconds(f"{field}.{name}", getattr(pace, name))
    return Pace(
        queue_s=pace.queue_s, block_s=pace.block_s, growth_s=pace.growth_s, step_blocks=max(1, pace.step_blocks)
    )


def lease_message(lease: Lease, layout: Layout, length: int, *, peer: bool = False) -> kvstore_pb2.LeaseResponse:
    """Tells where the blocks of a lease lie, and describes them for a `peer`."""
    blocks = lease.blocks
    return kvstore_pb2.LeaseResponse(
        lease_id=lease.lease_id,
        length=length,
        more=lease.more,
        offsets=[layout.offset(block.slot) for block in blocks],
        epochs=[block.epoch for block in blocks],
        tiers=[tier_message(lease.brought.get(index, TierKind.HOST)) for index in range(len(blocks))],
        checksums=b"".join([block.checksum for block in blocks]),
        about=[about_message(block) for block in blocks] if peer else (),
        namespaces=[block.namespace for block in blocks] if peer else (),
    )


def about_message(block: Block) -> kvstore_pb2.ReserveBlock:
    """Describes a block as another store needs it to keep a copy."""
    return kvstore_pb2.ReserveBlock(
        key=block.key, parent=block.parent, first_token=block.first_token, seconds=block.seconds
    )


_STATES = {
    common_pb2.SESSION_STATE_UNSPECIFIED: None,
    common_pb2.SESSION_STATE_ACTIVE: SessionPhase.ACTIVE,
    common_pb2.SESSION_STATE_TOOL: SessionPhase.TOOL,
    common_pb2.SESSION_STATE_USER: SessionPhase.USER,
    common_pb2.SESSION_STATE_ENDED: SessionPhase.ENDED,
}


def hear(sessions: SessionTable, hint: common_pb2.SessionHint, now: float) -> None:
    """A session hint, into the table; one of an unknown state is ignored. Raises InvalidRequest."""
    check_session("session", hint.session)
    returns_in = None
    if hint.HasField("returns_in_s"):
        check_seconds("returns_in_s", hint.returns_in_s)
        returns_in = hint.returns_in_s
    if hint.state == common_pb2.SESSION_STATE_ACTIVE:
        sessions.used(hint.session, now)
    elif hint.state in _STATES:
        sessions.hint(hint.session, _STATES[hint.state], now, returns_in)


Reports = Mapping[TierKind, Callable[[], Mapping[str, Any]]]
"""The figures of each tier that the store is set up with."""


def stats_message(
    partitions: Partitions, reports: Reports, *, host_id: str, sessions: int
) -> kvstore_pb2.StatsResponse:
    """All figures for the wire."""
    parts = partitions.of_models
    message = kvstore_pb2.StatsResponse(
        host_id=host_id,
        arena_bytes=sum(part.host.arena.size for part in parts),
        resynchronised=parts[0].store.tiers.hub.resynchronised,
        sessions=sessions,
        lent=sum(len(part.host.lent) for part in parts),
        **asdict(partitions.stats()),
        partitions=[_partition(part) for part in partitions],
    )
    if TierKind.NVME in reports:
        message.nvme.CopyFrom(kvstore_pb2.NvmeStats(**reports[TierKind.NVME]()))
    if TierKind.GPU in reports:
        message.gpu.CopyFrom(kvstore_pb2.GpuStats(**reports[TierKind.GPU]()))
    faults = sum((part.elsewhere.faults for part in parts), Counter[str]())
    others = len(parts[0].elsewhere.neighbours.others)
    message.pull.CopyFrom(kvstore_pb2.PullStats(faults=faults, others=others, **reports[TierKind.REMOTE]()))
    specs = [part.store.spec for part in parts if part.store.spec is not None]
    if specs:
        message.spec.CopyFrom(spec_to_message(specs[-1]))
    return message


def _partition(part: Partition) -> kvstore_pb2.PartitionStats:
    stats = part.store.stats()
    return kvstore_pb2.PartitionStats(
        spec=None if part.store.spec is None else spec_to_message(part.store.spec),
        slots=stats.slots,
        blocks=stats.blocks,
        evictions=stats.evictions,
        attachments=stats.attachments,
        draft=part.draft,
    )
