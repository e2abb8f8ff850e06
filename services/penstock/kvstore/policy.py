"""The eviction policies of `penstock.kv.policies`, over the blocks of this store.

A policy sees only blocks that may go: stored, not leased, and without a stored child, so that no child is ever
kept without its parent. It is pure: blocks in, a choice out.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.kv import policies
from penstock.kv.policies import Lru, make_policy
from penstock.kvstore.blocks import Block

EvictionPolicy = policies.EvictionPolicy[Block]
MakePolicy = Callable[[], EvictionPolicy]

__all__ = ["EvictionPolicy", "Lru", "MakePolicy", "make_policy"]
