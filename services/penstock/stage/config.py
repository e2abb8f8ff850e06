"""Settings of the stage service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.addresses import HostPort
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    OptionalPortAddress,
    addresses,
    at_least,
    one_of,
    optional_port_addresses,
    within,
)
from penstock.runtime.cores import check_cores

_MOST_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """A host of a stage. `model` is the only setting without a default; how the model is computed the worker says."""

    model: Path
    """The worker's model, a Hugging Face model directory here."""
    address: Address = HostPort("127.0.0.1:0")
    """Address to listen on, host:port or unix:/path; port 0 picks a free port."""
    threads: int = 0
    """Threads that compute one step, in each of the stage's processes; 0: this host's cores divided among them."""
    cores: str = ""
    """Cores on which the stage is computed, such as 0-3 or 0,2; empty: any."""
    drain_s: float = 5.0
    """Seconds that the worker gets to drain and end when this host stops; what still runs then goes on elsewhere."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, for a mesh over a network: the services show each other certificates. Without
    it nothing is asked of who calls, so nobody else may reach the address."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        check_cores(self.cores)
        addresses(self, "address")
        optional_port_addresses(self, "metrics_address")
        at_least(self, 0, "drain_s")
        within(self, 0, _MOST_THREADS, "threads")
        one_of(self, LOG_LEVELS, "log_level")
