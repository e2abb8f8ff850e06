"""The settings of the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from penstock.router.baselines import PolicyName
from penstock.rpc.bounds import is_id
from penstock.runtime.addresses import HostPort
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    ConfigError,
    OptionalPortAddress,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_port_addresses,
)
from penstock.runtime.redis_client import REDIS_GROUP_SCHEMES, REDIS_SCHEMES, without_password


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of one router."""

    address: Address = HostPort("127.0.0.1:0")
    """Address to listen on, host:port or unix:/path; port 0 picks a free port."""
    max_live_plans: int = 1024
    """Most requests in flight; further ones are refused at once."""
    max_queue_s: float = 120.0
    """A request that would have to wait for more seconds than this is refused at once."""
    hold_s: float = 1.0
    """A request is held back by the router, in fair order, while the workers that are best for it have prompts for more
    seconds than this before it, or no room to decode it; so that no tenant's flood fills the workers' own queues."""
    max_held: int = 1024
    """Most requests that are held back; then whoever has most of them loses its last."""
    max_held_bytes: int = 67_108_864
    """Most memory that their block keys take."""
    max_members: int = 1024
    """Most workers and stores that may join."""
    max_indexed_blocks: int = 1_000_000
    """Most blocks whose place is known; each takes about 200 bytes of memory, and the oldest are forgotten first."""
    local_prefill_tokens: int = 1_000_000
    """Most uncached prompt tokens that a decode worker computes itself, where that costs less than a hand-off; 0: none,
    as long as there is a prefill worker, and both have a store."""
    handoff_s: float = 0.01
    """Seconds that a hand-off from prefill to decode takes, without the time to move its bytes, as long as no worker
    has measured it."""
    pull_s: float = 0.01
    """Seconds that pulling blocks from the store of another host takes, without the time to move their bytes, as long
    as no worker has measured it."""
    silent_s: float = 2.0
    """Seconds after which a worker that has reported no load gets no work, and loses what it has; workers report twice
    a second. One that reports a step as overdue is out at once."""
    session_ttl_s: float = 1800.0
    """Seconds for which the router remembers the workers of a session."""
    max_sessions: int = 100_000
    """Most sessions that are remembered, here and in a shared state."""
    max_recent_plans: int = 1024
    """Most plans of which `penstock ctl explain` still tells what was weighed."""
    state: str = field(default="memory", repr=False)
    """Where several routers share what they know, and where it outlasts them: memory, which is nowhere, or the address
    of a Redis: redis://HOST:PORT/DATABASE, rediss://, unix:///PATH, redis+cluster://HOST:PORT or
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE."""
    name: str = ""
    """Name of this router among those that share a state, the same after a restart; empty: another at each start."""
    state_lease_s: float = 15.0
    """Seconds after which the others forget what a router has planned that they cannot hear of."""
    policy: PolicyName = "seconds"
    """How workers are chosen: by predicted seconds, or as a simpler rule would, to compare: round-robin, random,
    least-tokens, two-choices, prefix-hash, longest-prefix, cache-aware, dynamo or llm-d."""
    balance: bool = False
    """Let prefill and decode workers change sides when one role has too much to do and the other little; of several
    routers set it at one."""
    balance_dwell_s: float = 30.0
    """Seconds for which loads have to diverge before a worker changes sides, and for which none does after that."""
    seed: int = 0
    """Seed of the random choice between equally good workers; 0: draw a seed."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, for a mesh over a network: the services show each other certificates. Without
    it nothing is asked of who calls, so nobody else may reach the address."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        addresses(self, "address")
        optional_port_addresses(self, "metrics_address")
        more_than(self, 0, "max_live_plans", "max_queue_s", "max_members")
        more_than(self, 0, "max_indexed_blocks", "silent_s", "max_sessions", "balance_dwell_s")
        at_least(
            self,
            0,
            "hold_s",
            "max_held",
            "max_held_bytes",
            "local_prefill_tokens",
            "handoff_s",
            "pull_s",
            "session_ttl_s",
            "max_recent_plans",
            "seed",
        )
        at_least(self, 1, "state_lease_s")
        one_of(self, LOG_LEVELS, "log_level")
        if self.state != "memory" and not self.state.startswith((*REDIS_SCHEMES, *REDIS_GROUP_SCHEMES)):
            right = f"must be memory, or the address of a Redis: {', '.join((*REDIS_SCHEMES, *REDIS_GROUP_SCHEMES))}"
            raise ConfigError("state", without_password(self.state), right)
        if self.name and not is_id(self.name):
            raise ConfigError("name", self.name, "must be 1 to 128 letters, digits or . _ : -")
        one_of(self, get_args(PolicyName), "policy")
