"""What a store tells routers of its tiers, for people."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kvstore.events.messages import tier_message
from penstock.kvstore.tiers.base import Dropped
from penstock.v1 import common_pb2, kvstore_pb2, router_pb2


def load_message(stats: kvstore_pb2.StatsResponse, nvme_bytes: int) -> router_pb2.StoreLoad:
    """The figures of the tiers that there are, the nearest first; the disk's may have `nvme_bytes`."""
    tiers = []
    if stats.HasField("gpu"):
        gpu = stats.gpu
        tiers.append(
            router_pb2.TierLoad(
                tier=common_pb2.TIER_GPU,
                blocks=gpu.blocks,
                used_bytes=gpu.used_bytes,
                bytes=gpu.arena_bytes,
                given_blocks=gpu.hits + gpu.supplied,
                evictions=gpu.evictions,
            )
        )
    tiers.append(
        router_pb2.TierLoad(
            tier=common_pb2.TIER_HOST,
            blocks=stats.blocks,
            used_bytes=stats.used_bytes,
            bytes=stats.arena_bytes,
            given_blocks=max(0, stats.hits - stats.brought),
            evictions=stats.evictions,
        )
    )
    if stats.HasField("nvme"):
        nvme = stats.nvme
        tiers.append(
            router_pb2.TierLoad(
                tier=common_pb2.TIER_NVME,
                blocks=nvme.blocks,
                used_bytes=nvme.used_bytes,
                bytes=nvme_bytes,
                given_blocks=nvme.read_blocks,
                evictions=nvme.evictions,
            )
        )
    pulled = stats.pull.pulled_blocks + stats.pull.pool_blocks
    if stats.pull.others or pulled:
        tiers.append(router_pb2.TierLoad(tier=common_pb2.TIER_REMOTE, given_blocks=pulled))
    return router_pb2.StoreLoad(
        tiers=tiers,
        asked=stats.hits + stats.misses,
        missed=stats.misses,
        leases=stats.leases,
        attachments=stats.attachments,
        lent_blocks=stats.lent,
        sessions=stats.sessions,
    )


def evicted_message(number: int, dropped: Sequence[Dropped]) -> router_pb2.Evicted:
    """The answer to an eviction."""
    return router_pb2.Evicted(
        number=number,
        tiers=[
            router_pb2.EvictedBlocks(tier=tier_message(one.kind), blocks=one.blocks, bytes=one.bytes, in_use=one.in_use)
            for one in dropped
        ],
    )
