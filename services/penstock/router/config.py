"""The settings of the router."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    HostPort,
    OptionalAddress,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_addresses,
)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of one router."""

    address: Address = HostPort("127.0.0.1:0")
    """Where to listen; port 0 lets the kernel choose."""
    max_live_plans: int = 1024
    """Requests in flight; more are refused at once."""
    max_queue_s: float = 120.0
    """A request that would wait longer than this for its turn is refused at once."""
    max_members: int = 1024
    """Workers and stores that may be joined."""
    max_indexed_blocks: int = 1_000_000
    """Blocks known by name, about 200 bytes of memory each; the oldest are forgotten first."""
    local_prefill_tokens: int = 64
    """Up to this many uncached tokens may be computed by the decode worker itself, where that is quicker."""
    handoff_s: float = 0.01
    """Seconds that one hand-off from prefill to decode costs, apart from moving the bytes."""
    pull_s: float = 0.01
    """Seconds that fetching KV from the store of another host costs, apart from moving the bytes."""
    silent_s: float = 10.0
    """A worker that has reported no load for this long gets no work."""
    session_ttl_s: float = 1800.0
    """How long a session's workers are remembered."""
    max_sessions: int = 100_000
    """Sessions remembered."""
    seed: int = 0
    """Seed of the random choice between equals; 0 draws one."""
    metrics_address: OptionalAddress = None
    """Where Prometheus may read, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        addresses(self, "address")
        optional_addresses(self, "metrics_address")
        more_than(self, 0, "max_live_plans", "max_queue_s", "max_members")
        more_than(self, 0, "max_indexed_blocks", "silent_s", "max_sessions")
        at_least(self, 0, "local_prefill_tokens", "handoff_s", "pull_s", "session_ttl_s", "seed")
        one_of(self, LOG_LEVELS, "log_level")
