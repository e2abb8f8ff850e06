"""The settings of a gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.chat.formats.families import FORMATS
from penstock.runtime.addresses import HostPort, SocketAddress, is_loopback
from penstock.runtime.config import (
    LOG_LEVELS,
    Addresses,
    ConfigError,
    OptionalPortAddress,
    PortAddress,
    Size,
    address_lists,
    at_least,
    more_than,
    one_of,
    optional_port_addresses,
    port_addresses,
)
from penstock.runtime.redis_client import REDIS_SCHEMES


def _far_sites(own: str, written: Sequence[str]) -> Mapping[str, tuple[HostPort, ...]]:
    """The routers of each other site that the setting `far` names, in its order. Raises ConfigError."""
    found: dict[str, tuple[HostPort, ...]] = {}
    for said in written:
        name, _, routers = said.partition("=")
        try:
            listed = tuple(dict.fromkeys(HostPort(router.strip()) for router in routers.split(",")))
        except ValueError:
            raise ConfigError("far", said, "write NAME=HOST:PORT, for example osaka=10.2.0.1:7401") from None
        if not name or name == own or name in found:
            raise ConfigError("far", said, "give each other site one name, which is not that of --site")
        found[name] = listed
    return found


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of one gateway."""

    router: Addresses
    """Addresses of the routers, host:port or unix:/path, with commas between them. One plans until it fails, then
    another."""
    site: str = "here"
    """Name of the site that these routers and their workers are at."""
    far: tuple[str, ...] = ()
    """Routers of other sites, NAME=HOST:PORT,HOST:PORT for each site, the nearest first: requests go there where that
    is predicted to be sooner, the way included."""
    spill_s: float = 1.0
    """Seconds that a request may be predicted to wait here without another site being asked."""
    model_dir: Path
    """The model's directory; the gateway reads only its tokenizer and templates."""
    tool_format: str = ""
    """How the model writes tool calls: hermes, mistral, mistral-list, llama-json, llama-pythonic, gemma,
    gemma-tool-code, phi, deepseek-r1, deepseek-v3.1, kimi, or none. Empty: as its chat template shows."""
    model_name: str = ""
    """Name under which clients ask for the model; empty: the directory's name."""
    models: Path | None = None
    """A TOML file that names further models, which clients ask for by name: [NAME] with dir and, if it has to be said,
    tool_format."""
    also: tuple[str, ...] = ()
    """Further models, NAME=DIRECTORY for each."""
    http_address: PortAddress = HostPort("127.0.0.1:8080")
    """Address of the HTTP API, host:port; port 0 picks a free port."""
    grpc_address: PortAddress = HostPort("127.0.0.1:0")
    """Address of the gRPC API, host:port; port 0 picks a free port."""
    api_keys: Path | None = None
    """The file that `penstock keys add` writes; without it all clients are the tenant "default"."""
    terms: Path | None = None
    """A TOML file with the prices of tokens and the limits of tenants; without it all is free and unlimited."""
    ledger: str = field(default="", repr=False)
    """Where the use of each tenant is written: a file, or redis://HOST:PORT/DB, which gateways may share; empty: only
    kept while the gateway runs."""
    tls_cert: Path | None = None
    """The PEM file of a certificate with its chain, for HTTPS and for gRPC over TLS; followed when it changes."""
    tls_key: Path | None = None
    """The PEM file of its key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the gateway, such as https://chat.example; * for all."""
    server_key: Annotated[str, Parameter(show_default=False)] = field(default="", repr=False)
    """Secret that separates tenants in the cache, 32 hexadecimal digits or more; the same for all gateways of a mesh.
    Empty: a built-in one, which suits a single user and is refused together with api_keys."""
    server_key_file: Path | None = None
    """A file that contains the server key; give this or server_key."""
    unknown_fields: str = "refuse"
    """What happens to a request with an unknown field. refuse: it fails. warn: the field is ignored, and the response
    names it in the header x-penstock-ignored-fields; for clients that cannot be changed."""
    max_live_requests: int = 256
    """Most requests at a time; further ones get a 503 at once."""
    max_body_bytes: Size = 16 * 1024 * 1024
    """Most bytes of one HTTP body."""
    max_upload_bytes: Size = 256 * 1024 * 1024
    """Most bytes of all HTTP bodies that are arriving; a request whose body finds no room gets a 503."""
    max_picture_bytes: Size = 256 * 1024 * 1024
    """Most bytes of the pixels of all pictures that something is being answered about; a request whose pictures find no
    room gets a 503."""
    max_n: int = 16
    """Most choices of one request, for all its prompts together."""
    max_request_tokens: int = 524_288
    """Most tokens of all answers of one request; the max_tokens of each of its choices is lowered to an equal share."""
    max_output_tokens: int = 131_072
    """Most tokens of one answer; a larger max_tokens is lowered to this, and to the room left in the model's
    context."""
    request_timeout_s: float = 600.0
    """Most seconds that a request may take in all."""
    failover_s: float = 120.0
    """Seconds for which a request without a deadline of its own waits, without a token, for a worker or the router to
    take it; 0: it does not wait. One with a deadline waits until then."""
    max_sessions: int = 1024
    """Most sessions whose last prompts and answers are remembered."""
    max_session_tokens: int = 4_000_000
    """Most tokens of all remembered sessions together."""
    max_tenant_session_tokens: int = 2_000_000
    """Most tokens of one tenant's remembered sessions together."""
    volatile_lines: str = "keep"
    """What happens to lines at the head of a system prompt that change with every request, such as the time or a
    request's id. keep: nothing. move: they go behind the system prompt. drop: they are left out. With move and drop,
    the text behind them is found in the cache."""
    volatile_pattern: str = ""
    """A regular expression for such lines, in addition to those that are known."""
    responses_store: str = field(default="memory", repr=False)
    """Where responses with store: true are kept: memory, or redis://HOST:PORT/DATABASE, which outlasts the gateway and
    may be shared by several."""
    responses_ttl_s: float = 86_400.0
    """Seconds for which a stored response is kept after its last use."""
    max_responses: int = 20_000
    """Most stored responses of all tenants together; the least recently used ones are forgotten."""
    max_responses_bytes: Size = 256 * 1024 * 1024
    """Most bytes of all stored responses together."""
    max_tenant_responses: int = 5_000
    """Most stored responses of one tenant."""
    max_tenant_responses_bytes: Size = 64 * 1024 * 1024
    """Most bytes of one tenant's stored responses together."""
    answer_store: str = field(default="", repr=False)
    """Where the tokens of answers are kept for ten minutes that a client may ask for again after its gateway's death:
    redis://HOST:PORT/DATABASE, which gateways share; empty: nowhere, and another gateway generates them again."""
    batch_store: str = field(default="", repr=False)
    """Where files and batches are kept: a directory, which gateways of one host may share, or
    redis://HOST:PORT/DATABASE, for those of several hosts; empty: /v1/files and /v1/batches are off."""
    max_file_bytes: Size = 200 * 1024 * 1024
    """Most bytes of one file that a client sends."""
    max_tenant_file_bytes: Size = 2 * 1024 * 1024 * 1024
    """Most bytes of all files of one tenant; results of batches count, and are kept however many there are."""
    max_tenant_files: int = 1000
    """Most files of one tenant, likewise."""
    max_batch_lines: int = 50_000
    """Most lines of one batch."""
    max_tenant_batches: int = 100
    """Most batches of one tenant that are not over."""
    max_live_lines: int = 1024
    """Most lines of batches that are on their way at one time, however much room the mesh has."""
    batch_kept_s: float = 30 * 86_400.0
    """Seconds for which files, and batches that are over, are kept."""
    max_past_requests: int = 1024
    """Requests that have ended of which GET /v1/requests/ID still tells."""
    max_past_bytes: Size = 8 * 1024 * 1024
    """All that it tells of them together."""
    first_ping_s: float = 15.0
    """Seconds of silence after which a stream that has not begun gets a comment, so that proxies do not close it. With
    it the stream begins: what goes wrong from then on is an event, not a status."""
    ping_s: float = 0.5
    """Seconds of silence after which a stream that has begun gets a comment, so that a client which hears nothing for
    longer knows that this gateway is gone."""
    drain_s: float = 5.0
    """Seconds that running requests get to end when the gateway stops."""
    reflection: bool = True
    """Clients may ask over gRPC which services and messages there are, without a key."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, which says to the other services of a mesh over a network who this is;
    clients have nothing to do with it."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics besides GET /metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    @property
    def sites(self) -> Mapping[str, Sequence[SocketAddress]]:
        """The routers of each site, this gateway's first."""
        return {self.site: self.router, **_far_sites(self.site, self.far)}

    def __post_init__(self) -> None:
        if not self.model_dir.is_dir():
            raise ConfigError("model_dir", str(self.model_dir), "must be the directory of the served model")
        address_lists(self, "router")
        if not self.router:
            raise ConfigError("router", "", "give the address of a router, host:port")
        _far_sites(self.site, self.far)
        port_addresses(self, "http_address", "grpc_address")
        optional_port_addresses(self, "metrics_address")
        at_least(
            self,
            1,
            "max_live_requests",
            "max_body_bytes",
            "max_upload_bytes",
            "max_picture_bytes",
            "max_n",
            "max_request_tokens",
        )
        at_least(self, 1, "max_output_tokens", "max_file_bytes", "max_tenant_file_bytes", "max_tenant_files")
        at_least(self, 1, "max_batch_lines", "max_tenant_batches", "max_live_lines", "batch_kept_s")
        at_least(self, 1, "max_responses", "max_responses_bytes", "max_tenant_responses", "max_tenant_responses_bytes")
        more_than(self, 0, "request_timeout_s", "first_ping_s", "ping_s", "responses_ttl_s")
        at_least(
            self,
            0,
            "spill_s",
            "failover_s",
            "max_sessions",
            "max_session_tokens",
            "max_tenant_session_tokens",
            "drain_s",
        )
        at_least(self, 0, "max_past_requests", "max_past_bytes")
        one_of(self, LOG_LEVELS, "log_level")
        one_of(self, ("keep", "move", "drop"), "volatile_lines")
        try:
            re.compile(self.volatile_pattern)
        except re.error as error:
            raise ConfigError(
                "volatile_pattern", self.volatile_pattern, f"must be a regular expression: {error}"
            ) from None
        one_of(self, ("refuse", "warn"), "unknown_fields")
        if self.tool_format:
            one_of(self, tuple(FORMATS), "tool_format")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_key", str(self.tls_key or ""), "must be set together with tls_cert")
        if self.api_keys is None:
            for name in ("http_address", "grpc_address"):
                if not is_loopback(getattr(self, name).host):
                    right = "must be 127.0.0.1 or another address of this host alone, unless api_keys are set"
                    raise ConfigError(name, getattr(self, name), right)
        if self.responses_store != "memory" and not self.responses_store.startswith(REDIS_SCHEMES):
            right = "must be memory or redis://HOST:PORT/DATABASE"
            raise ConfigError("responses_store", self.responses_store[:16], right)
        if self.answer_store and not self.answer_store.startswith(REDIS_SCHEMES):
            right = "must be redis://HOST:PORT/DATABASE, or empty"
            raise ConfigError("answer_store", self.answer_store.partition("://")[0][:16], right)
        if "://" in self.batch_store and not self.batch_store.startswith(REDIS_SCHEMES):
            right = "must be a directory or redis://HOST:PORT/DATABASE"
            raise ConfigError("batch_store", self.batch_store.partition("://")[0], right)
        if self.server_key and self.server_key_file:
            raise ConfigError("server_key_file", str(self.server_key_file), "must be empty where server_key is set")

    @property
    def served_name(self) -> str:
        """The model's public name."""
        return self.model_name or self.model_dir.resolve().name
