"""Has the blocks of one tenant leave a table, in pieces: a table may have a million blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.kvstore.table.blocks import Block, TierKind
from penstock.kvstore.table.table import BlockTable
from penstock.kvstore.tiers.base import Dropped

_PIECE = 2048


async def drop_tenant(
    table: BlockTable, kind: TierKind, namespace: bytes, gone: Callable[[list[Block]], object] = lambda blocks: None
) -> Dropped:
    """Discards them, and tells `gone` of those of each piece before anything else happens to their slots. None of the
    copies that are on their way into the table becomes findable."""
    blocks = in_use = 0
    coming = table.puts.unwant(namespace)
    keys = list(table.keys())
    for begin in range(0, len(keys), _PIECE):
        found = [block for key in keys[begin : begin + _PIECE] if (block := table.find(key)) is not None]
        found = [block for block in found if block.namespace == namespace]
        for block in found:
            in_use += block.pins > 0
            table.discard(block.key)
        blocks += len(found)
        if found:
            gone(found)
        await asyncio.sleep(0)
    return Dropped(kind, blocks, blocks * table.block_bytes, in_use, coming)
