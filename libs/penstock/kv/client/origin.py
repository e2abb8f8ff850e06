"""The owner of a block, as far as a store is told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Origin:
    """Session and tenant of blocks that are stored or fetched. The store learns from them which blocks to keep."""

    session: str = ""
    """Digest of the session; empty: unknown."""
    namespace: bytes = b""
    """Of the tenant, NAMESPACE_BYTES long; empty: unknown."""
    sources: tuple[str, ...] = ()
    """Stores of other hosts that are said to hold what this one lacks; only for fetching."""
    seal: bytes = field(default=b"", repr=False)
    """The key of the tenant's sealed blocks, which no store is told; empty: unknown."""


NOBODY = Origin()
