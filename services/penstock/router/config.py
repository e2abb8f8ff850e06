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
    """Address to listen on, host:port; port 0 picks a free port."""
    max_live_plans: int = 1024
    """Most requests in flight; further ones are refused at once."""
    max_queue_s: float = 120.0
    """A request that would have to wait for more seconds than this is refused at once."""
    max_members: int = 1024
    """Most workers and stores that may join."""
    max_indexed_blocks: int = 1_000_000
    """Most blocks whose place is known; each takes about 200 bytes of memory, and the oldest are forgotten first."""
    local_prefill_tokens: int = 64
    """Most uncached prompt tokens that a decode worker computes itself, where that is faster than a hand-off."""
    handoff_s: float = 0.01
    """Seconds that a hand-off from prefill to decode takes, without the time to move its bytes."""
    pull_s: float = 0.01
    """Seconds that pulling blocks from the store of another host takes, without the time to move their bytes."""
    silent_s: float = 10.0
    """Seconds after which a worker that has reported no load gets no work."""
    session_ttl_s: float = 1800.0
    """Seconds for which the router remembers the workers of a session."""
    max_sessions: int = 100_000
    """Most sessions that are remembered."""
    seed: int = 0
    """Seed of the random choice between equally good workers; 0: draw a seed."""
    metrics_address: OptionalAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        addresses(self, "address")
        optional_addresses(self, "metrics_address")
        more_than(self, 0, "max_live_plans", "max_queue_s", "max_members")
        more_than(self, 0, "max_indexed_blocks", "silent_s", "max_sessions")
        at_least(self, 0, "local_prefill_tokens", "handoff_s", "pull_s", "session_ttl_s", "seed")
        one_of(self, LOG_LEVELS, "log_level")
