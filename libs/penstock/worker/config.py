"""Settings that every worker has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.engine.config import EngineConfig
from penstock.kv.host import host_id
from penstock.kv.sealing import check_seal
from penstock.runtime.addresses import HostPort
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    Addresses,
    ConfigError,
    OptionalAddress,
    OptionalPortAddress,
    Size,
    address_lists,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_addresses,
    optional_port_addresses,
)
from penstock.runtime.cores import check_cores

_NOT_GIVEN: Any = None
"""Refused by `__post_init__`. Without a default the command line would say that `*` is missing, not the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's settings and those of its engine, of which `model` is the only one without a default."""

    engine: Annotated[EngineConfig, Parameter(name="*")] = _NOT_GIVEN
    """The model, and how it is computed."""
    model_name: str = ""
    """Name under which clients ask for the model; empty: the directory's name."""
    address: Address = HostPort("127.0.0.1:0")
    """Address to listen on, host:port or unix:/path; port 0 picks a free port."""
    advertise: OptionalAddress = None
    """Address at which others reach this worker, host:port or unix:/path; empty: that of `address`."""
    router: Addresses = ()
    """Addresses of all routers, host:port or unix:/path, with commas between them; the worker joins each. Empty:
    none."""
    kvstore: OptionalAddress = None
    """Address of this host's kvstore, host:port or unix:/path; empty: none, and everything is computed."""
    host_id: str = ""
    """Members with the same host id share memory; empty: this machine's id."""
    stage_hosts: Addresses = ()
    """Addresses of hosts that compute the stages of `pp` but the first, in their order, host:port or unix:/path, with
    commas between them; on each runs `penstock stage` with the same model. Empty: all stages are on this host."""
    cores: str = ""
    """Cores on which the worker runs, such as 0-3 or 0,2; empty: any."""
    draft: str = "none"
    """Address of the draft service, for when it decodes, host:port or unix:/path, or none."""
    handoff_wait_s: float = 10.0
    """Seconds that a decode worker's request for a hand-off waits for the gateway's request to arrive."""
    handoff_keep_s: float = 10.0
    """Seconds that a finished hand-off is kept for its decode worker."""
    store_timeout_s: float = 2.0
    """Seconds after which a call to the store counts as a miss."""
    lend: bool = True
    """Leave blocks where they were computed, for the store to take them from there, as long as there is room. A worker
    that only computes prompts does not, because decode asks for all of them at once, nor one that began so."""
    seal: bool = False
    """Encrypt and authenticate blocks before they leave the worker, with a key of their tenant that the gateway sends
    with each request, derived from its server key. Blocks are then copied to the store, not lent, and none stays on a
    GPU. All workers of a model have the same setting."""
    claim_s: float = 0.03
    """Least seconds of computing for which other workers' blocks are waited for, and own ones claimed at the store."""
    fetch_wait_s: float = 0.03
    """Least seconds for which blocks are waited for that the store has to bring from its disk or another host, however
    soon they could be computed."""
    picture_bytes: Size = 256 << 20
    """Memory for pixels of the pictures that requests show, such as 256MiB; those of a picture in 17 tiles are 6 MB."""
    drain_s: float = 5.0
    """Seconds that running requests get to end when the worker stops; the router sends nothing new meanwhile."""
    step_limit_s: float = 30.0
    """Seconds after which a step that is overdue counts as stuck, for the supervisor; and that a step may take of which
    nobody knows how long it should take. One that is overdue, by ten times what it should take, gets the worker out of
    rotation until it ends."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, for a mesh over a network: the services show each other certificates. Without
    it nothing is asked of who calls, so nobody else may reach the address."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        if self.engine is _NOT_GIVEN:
            raise ConfigError("model", "", "give a Hugging Face model directory")
        check_cores(self.cores)
        addresses(self, "address")
        address_lists(self, "router", "stage_hosts")
        if self.stage_hosts and len(self.stage_hosts) != self.engine.pp - 1:
            right = f"must be one for each stage but the first: pp is {self.engine.pp}"
            raise ConfigError("stage_hosts", ",".join(self.stage_hosts), right)
        optional_addresses(self, "advertise", "kvstore")
        optional_port_addresses(self, "metrics_address")
        if self.draft not in ("", "none"):
            addresses(self, "draft")
        more_than(self, 0, "store_timeout_s", "step_limit_s")
        at_least(self, 0, "claim_s", "fetch_wait_s", "drain_s", "handoff_wait_s", "handoff_keep_s")
        one_of(self, LOG_LEVELS, "log_level")
        check_seal(self.seal)

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        return self.model_name or self.engine.model.name

    @property
    def host(self) -> str:
        """The host id."""
        return self.host_id or host_id()
