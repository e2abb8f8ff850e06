"""The settings of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from cyclopts import Parameter

from penstock.cli.scale.needs import SloTargets
from penstock.cli.scale.state import ScaleKnobs, WorkRole
from penstock.engine.config import EngineSettings
from penstock.models import NAMES
from penstock.runtime.config import (
    LOG_LEVELS,
    Addresses,
    ConfigError,
    OptionalPortAddress,
    address_lists,
    at_least,
    more_than,
    one_of,
    optional_port_addresses,
    within,
)

ActuatorName = Literal["none", "local", "kubernetes", "webhook"]
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LEAST_KEY = 16
_IDLE_S = 5.0
"""A hand-off takes no longer than a prompt, so what is planned for a worker is there within the TTFT target."""


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """Settings of `penstock scale`, for one model of a mesh."""

    router: Addresses = ()
    """Addresses of routers, host:port or unix:/path, with commas between them; the first that answers is asked."""
    actuator: ActuatorName = "none"
    """Who starts and ends workers: none (they only change roles), local, kubernetes or webhook."""
    model_name: str = ""
    """The model, as clients ask for it; empty: the only one that the mesh has."""
    ttft_p90_ms: float = 2000.0
    """Milliseconds until the first token within which the share of requests shall be that --goodput names."""
    itl_p90_ms: float = 100.0
    """Likewise between two tokens."""
    goodput: float = 0.9
    """Share of requests and tokens, 0.5 to 0.999, that shall meet the targets."""
    min_prefill: int = 1
    """Fewest prefill workers."""
    max_prefill: int = 4
    """Most of them."""
    min_decode: int = 1
    """Fewest decode workers."""
    max_decode: int = 4
    """Most of them."""
    every_s: float = 5.0
    """Seconds between two looks at the mesh."""
    start_s: float = 30.0
    """Seconds that a new worker takes to be ready: so far ahead the load is predicted."""
    down_after_s: float = 60.0
    """Seconds for which fewer workers of a role must have been enough before one is drained."""
    flip_after_s: float = 15.0
    """Likewise before one changes to the other role, where that lacks some."""
    cool_s: float = 60.0
    """Seconds for which a role that has got a worker gives none away."""
    dry_run: bool = False
    """Print decisions and their reasons, and do nothing."""
    gateway_http: Addresses = ()
    """HTTP addresses of gateways, whose /metrics tell of TTFT and ITL. Default: those that the router knows."""
    key_file: Path | None = None
    """A file with an operator's key, where gateways ask for keys."""
    ca: Path | None = None
    """The PEM file of the authority that signed the certificates of the gateways, and of the webhook."""
    kubernetes: str = ""
    """The workload whose pods are the workers: NAMESPACE/deployments/NAME; or with group and version, such as
    NAMESPACE/leaderworkerset.x-k8s.io/v1/leaderworkersets/NAME."""
    kubernetes_api: str = "https://kubernetes.default.svc"
    """Address of the API server."""
    kubernetes_token: Path = _ACCOUNT / "token"
    """The file with the token of the service account."""
    kubernetes_ca: Path = _ACCOUNT / "ca.crt"
    """The PEM file of the authority that signed the API server's certificate."""
    webhook: str = ""
    """Address that is called to start or end a worker."""
    webhook_key_file: Path | None = None
    """A file with the key that signs these calls, 16 bytes or more."""
    model: Annotated[str, Parameter(name="--model")] = NAMES[0]
    """What local workers serve: a model directory, its name on the hub, or the name of an embedded model."""
    engine: Annotated[EngineSettings, Parameter(name="*")] = field(default_factory=EngineSettings)
    """How local workers compute: as those of the mesh do."""
    seal: bool = False
    """Local workers seal their blocks: set it where those of the mesh do, whose store has theirs alone else."""
    worker_tls: Path | None = None
    """A directory of `penstock ca issue worker` for local workers, where services show each other certificates."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue operator`, where the services of the mesh show each other certificates."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        address_lists(self, "router", "gateway_http")
        optional_port_addresses(self, "metrics_address")
        if not self.router:
            raise ConfigError("router", "", "must be the address of a router, for example 127.0.0.1:7401")
        one_of(self, get_args(ActuatorName), "actuator")
        one_of(self, LOG_LEVELS, "log_level")
        more_than(self, 0, "ttft_p90_ms", "itl_p90_ms", "every_s")
        at_least(self, 0, "start_s", "down_after_s", "flip_after_s", "cool_s")
        within(self, 0.5, 0.999, "goodput")
        within(self, 1, 1024, "min_prefill", "min_decode")
        within(self, self.min_prefill, 1024, "max_prefill")
        within(self, self.min_decode, 1024, "max_decode")
        self._check_actuator()

    def _check_actuator(self) -> None:
        if self.actuator == "kubernetes":
            self.workload()
            _check_url("kubernetes_api", self.kubernetes_api)
        if self.actuator == "webhook":
            _check_url("webhook", self.webhook)
            self.webhook_key()

    def workload(self) -> tuple[str, str, str]:
        """Namespace, resource and name of `kubernetes`. Raises ConfigError."""
        namespace, _, rest = self.kubernetes.partition("/")
        resource, _, name = rest.rpartition("/")
        if not (namespace and resource and name) or resource.count("/") not in (0, 2):
            raise ConfigError("kubernetes", self.kubernetes, "must be NAMESPACE/deployments/NAME")
        return namespace, resource, name

    def webhook_key(self) -> bytes:
        """The key. Raises ConfigError."""
        path = self.webhook_key_file
        if path is None:
            right = "must be set with webhook; make one with `openssl rand -hex 32 > FILE`"
            raise ConfigError("webhook_key_file", "", right)
        try:
            key = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError("webhook_key_file", str(path), f"cannot be read: {error.strerror}") from None
        if len(key) < _LEAST_KEY:
            raise ConfigError("webhook_key_file", str(path), f"must have {_LEAST_KEY} bytes or more")
        return key

    def knobs(self) -> ScaleKnobs:
        """For decisions."""
        least: Mapping[WorkRole, int] = {"prefill": self.min_prefill, "decode": self.min_decode}
        most: Mapping[WorkRole, int] = {"prefill": self.max_prefill, "decode": self.max_decode}
        return ScaleKnobs(
            targets=SloTargets(ttft_s=self.ttft_p90_ms / 1e3, itl_s=self.itl_p90_ms / 1e3, share=self.goodput),
            least=least,
            most=most,
            every_s=self.every_s,
            start_s=self.start_s,
            down_after_s=self.down_after_s,
            flip_after_s=self.flip_after_s,
            cool_s=self.cool_s,
            idle_s=min(_IDLE_S, self.ttft_p90_ms / 1e3),
        )


def _check_url(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(name, url, "must be an address such as https://HOST:PORT/PATH")
