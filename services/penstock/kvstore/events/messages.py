"""Changes of the store, for the wire."""

from __future__ import annotations

from typing import cast

from penstock.kv.events import Change
from penstock.kvstore.table.blocks import TierKind
from penstock.v1 import common_pb2


def events_message(change: Change[TierKind]) -> common_pb2.BlockEvents:
    """A Change for the wire."""
    return common_pb2.BlockEvents(
        stored=change.stored,
        removed=change.removed,
        snapshot=change.snapshot,
        tier=tier_message(change.tier or TierKind.HOST),
    )


def tier_message(kind: TierKind) -> common_pb2.Tier.ValueType:
    """A TierKind for the wire."""
    return cast(common_pb2.Tier.ValueType, int(kind))
