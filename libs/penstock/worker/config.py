"""Settings that every worker has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from penstock.engine.config import EngineConfig
from penstock.kv.host import host_id
from penstock.runtime.config import ConfigError
from penstock.runtime.cores import parse_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's settings beside those of its engine, of which `model` is the only one without a default."""

    engine: Annotated[EngineConfig, Parameter(name="*")]
    """The model, and how it is computed."""
    model_name: str = ""
    """The name clients ask for; the directory's name when empty."""
    address: str = "127.0.0.1:0"
    """Where to listen; port 0 picks one."""
    router: str = ""
    """The router's address; empty: join none."""
    kvstore: str = ""
    """This host's kvstore; empty: compute everything."""
    host_id: str = ""
    """Members with one host id share memory; empty: this machine's."""
    cores: str = ""
    """Cores to stay on, such as 0-3 or 0,2; empty: wherever the system puts the worker."""
    store_timeout_s: float = 2.0
    """A store call that takes longer counts as a miss."""
    drain_s: float = 5.0
    """Seconds that running requests get when the worker stops."""
    metrics_address: str = ""
    """Where Prometheus may read, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        try:
            parse_cores(self.cores)
        except ValueError as error:
            raise ConfigError("cores", self.cores, str(error)) from error
        if self.store_timeout_s <= 0:
            raise ConfigError("store_timeout_s", self.store_timeout_s, "must be positive")

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        return self.model_name or self.engine.model.name

    @property
    def host(self) -> str:
        """The host id."""
        return self.host_id or host_id()
