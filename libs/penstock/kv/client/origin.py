"""For whom a block is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """For whom blocks are stored or fetched. The store learns from it what is worth keeping."""

    session: str = ""
    """Digest of the session; empty: unknown."""
    namespace: bytes = b""
    """Of the tenant, NAMESPACE_BYTES long; empty: unknown."""
    sources: tuple[str, ...] = ()
    """Stores of other hosts that are said to hold what this one lacks; only for fetching."""


NOBODY = Origin()
