"""Settings that every worker has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.engine.config import EngineConfig
from penstock.kv.host import host_id
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    ConfigError,
    HostPort,
    OptionalAddress,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_addresses,
)
from penstock.runtime.cores import parse_cores

_NOT_GIVEN: Any = None
"""Refused by `__post_init__`. Without a default the command line would say that `*` is missing, not the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's settings and those of its engine, of which `model` is the only one without a default."""

    engine: Annotated[EngineConfig, Parameter(name="*")] = _NOT_GIVEN
    """The model, and how it is computed."""
    model_name: str = ""
    """The name clients ask for; the directory's name when empty."""
    address: Address = HostPort("127.0.0.1:0")
    """Where to listen; port 0 picks one."""
    router: OptionalAddress = None
    """The router's address; empty: join none."""
    kvstore: OptionalAddress = None
    """This host's kvstore; empty: compute everything."""
    host_id: str = ""
    """Members with one host id share memory; empty: this machine's."""
    cores: str = ""
    """Cores to stay on, such as 0-3 or 0,2; empty: wherever the system puts the worker."""
    store_timeout_s: float = 2.0
    """A store call that takes longer counts as a miss."""
    drain_s: float = 5.0
    """Seconds that running requests get when the worker stops; the router sends nothing new meanwhile."""
    step_limit_s: float = 30.0
    """A worker whose step takes longer than this is not healthy, and gets no work until the step ends."""
    metrics_address: OptionalAddress = None
    """Where Prometheus may read, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        if self.engine is _NOT_GIVEN:
            raise ConfigError("model", "", "give a Hugging Face model directory")
        try:
            parse_cores(self.cores)
        except ValueError as error:
            raise ConfigError("cores", self.cores, str(error)) from error
        addresses(self, "address")
        optional_addresses(self, "router", "kvstore", "metrics_address")
        more_than(self, 0, "store_timeout_s", "step_limit_s")
        at_least(self, 0, "drain_s")
        one_of(self, LOG_LEVELS, "log_level")

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        return self.model_name or self.engine.model.name

    @property
    def host(self) -> str:
        """The host id."""
        return self.host_id or host_id()
