"""Which block goes when room is needed: a protocol, our policy, and references to compare it with.

Pure Python, no dependency, no I/O: usable with any table whose blocks have the attributes of `Evictable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.kv.eviction.base import SEVERAL, Evictable, EvictionPolicy
from penstock.kv.eviction.lru import Lru
from penstock.kv.eviction.s3fifo import S3Fifo
from penstock.kv.eviction.worth import Worth

POLICIES = ("worth", "s3-fifo", "lru")

__all__ = ["POLICIES", "SEVERAL", "Evictable", "EvictionPolicy", "Lru", "S3Fifo", "Worth", "make_policy"]


def make_policy(name: str, clock: Callable[[], float]) -> EvictionPolicy[Any]:
    """A policy by its name, one of POLICIES. Raises ValueError on another name."""
    if name == "worth":
        return Worth(clock)
    if name == "s3-fifo":
        return S3Fifo()
    if name == "lru":
        return Lru()
    raise ValueError(f"eviction policy {name!r} is unknown: one of {', '.join(POLICIES)}")
