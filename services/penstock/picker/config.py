"""The settings of the endpoint picker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.addresses import HostPort
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    Addresses,
    ConfigError,
    OptionalPortAddress,
    address_lists,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_port_addresses,
)


@dataclass(frozen=True, kw_only=True)
class PickerConfig:
    """Settings of one picker."""

    router: Addresses = ()
    """Addresses of the routers, host:port or unix:/path, with commas between them; the first that answers says which
    gateways there are."""
    address: Address = HostPort("127.0.0.1:9002")
    """Address to listen on, host:port or unix:/path; port 0 picks a free port."""
    look_s: float = 0.5
    """Seconds between two looks at the mesh: which gateways are there and take requests, and how long workers' queues
    are."""
    most_over: float = 1.25
    """A session stays at its gateway while that has at most so many times its share of the requests that wait for
    their answer to begin."""
    max_queue_s: float = 120.0
    """A request is refused with 429 while each worker that could take it has a queue of more seconds than this."""
    max_streams: int = 4096
    """Most requests whose streams are open at a time."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, which says to the other services of a mesh over a network who this is;
    clients have nothing to do with it."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        """Raises ConfigError on a setting that can't work."""
        address_lists(self, "router")
        if not self.router:
            raise ConfigError("router", "", "give the address of a router, host:port")
        addresses(self, "address")
        optional_port_addresses(self, "metrics_address")
        more_than(self, 0, "look_s", "max_queue_s")
        at_least(self, 1, "most_over", "max_streams")
        one_of(self, LOG_LEVELS, "log_level")
