"""Block events as vLLM's subscribers read them: `[topic, sequence number, payload]`.

The sequence number has 8 bytes, big-endian, from 0. The payload is msgpack of the array
`[seconds since 1970, events, data parallel rank]`. An event is a map with its name under `type`, which is what vLLM
publishes since 2026, or, in the `array` style of earlier ones, an array that begins with its name::

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
    BlockRemoved      block_hashes, medium
    AllBlocksCleared

- A hash is the last 8 bytes of the block's key as an unsigned number: the form that vLLM gives its own sha256 keys by
  default, and the only one that every consumer we know of reads.
- `token_ids` is always empty. The store does not know the tokens, and a stream that carries them would show every
  tenant's prompts to every listener. So a watcher that looks blocks up by hash (it computes ours as
  `penstock.kv.identity` does) can follow the stream; one that hashes the token ids itself learns of no prefix from it.
- The tenant's namespace is inside the key, and nowhere else: equal prompts of two tenants have unrelated hashes.
- `medium` is GPU, CPU or DISK. A block that moves is removed from the one and stored in the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

Event = dict[str, Any]

CLEARED: Event = {"type": "AllBlocksCleared"}
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number after the last replayed batch."""
STYLES = ("map", "array")


@dataclass(frozen=True, slots=True)
class Held:
    """The facts that an event tells of a stored block."""

    key: bytes
    parent: bytes
    first_token: int
    medium: str
    block_size: int
    """In tokens."""


def number(key: bytes) -> int:
    """A key's hash on the wire."""
    return int.from_bytes(key[-8:], "big")


def stored(blocks: Iterable[Held]) -> list[Event]:
    """One event for each run of blocks that follow each other in one medium."""
    events: list[Event] = []
    last: Held | None = None
    for block in blocks:
        if last is not None and block.parent == last.key and block.medium == last.medium:
            events[-1]["block_hashes"].append(number(block.key))
        else:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [number(block.key)],
                    "parent_block_hash": number(block.parent) if block.first_token else None,
                    "token_ids": [],
                    "block_size": block.block_size,
                    "lora_id": None,
                    "medium": block.medium,
                    "lora_name": None,
                }
            )
        last = block
    return events


def removed(keys: Iterable[tuple[bytes, str]]) -> list[Event]:
    """One event per medium; `keys` are pairs of key and medium."""
    by_medium: dict[str, list[int]] = {}
    for key, medium in keys:
        by_medium.setdefault(medium, []).append(number(key))
    return [{"type": "BlockRemoved", "block_hashes": hashes, "medium": medium} for medium, hashes in by_medium.items()]


def payload(ts: float, events: Iterable[Event], style: str, rank: int = 0) -> bytes:
    """A batch; `style` is one of STYLES."""
    shaped = [list(event.values()) if style == "array" else event for event in events]
    return msgspec.msgpack.encode([ts, shaped, rank])
