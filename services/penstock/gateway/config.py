"""The settings of a gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.chat.formats.families import FORMATS
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    ConfigError,
    HostPort,
    OptionalAddress,
    Size,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_addresses,
)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of one gateway."""

    router: Address
    """Where the router serves, host:port."""
    model_dir: Path
    """The served model's directory; only its tokenizer and templates are read."""
    tool_format: str = ""
    """How the model writes tool calls, one of hermes, mistral, mistral-list, llama-json, llama-pythonic, gemma,
    gemma-tool-code, phi, deepseek-r1, deepseek-v3.1, kimi and none. Empty: as its chat template shows."""
    model_name: str = ""
    """The name that clients ask for; empty: the directory's name."""
    http_address: Address = HostPort("127.0.0.1:8080")
    """Where HTTP listens; port 0 lets the kernel choose."""
    grpc_address: Address = HostPort("127.0.0.1:0")
    """Where gRPC listens; port 0 lets the kernel choose."""
    api_keys: Path | None = None
    """The file of `penstock keys add`; without it all clients are the tenant "default"."""
    terms: Path | None = None
    """A TOML file with the prices of tokens and the limits of tenants; without it all is free and unlimited."""
    ledger: str = ""
    """Where the use of each tenant is written: a file, or redis://HOST:PORT/DB, which gateways may share; empty: only
    kept while the gateway runs."""
    server_key: Annotated[str, Parameter(show_default=False)] = field(default="", repr=False)
    """Hex, 32 characters or more: separates tenants in the cache. All gateways of a mesh need the same. Empty: a
    built-in one, which is good for a single user and refused together with api_keys."""
    server_key_file: Path | None = None
    """A file that holds the server key, instead of server_key."""
    unknown_fields: str = "refuse"
    """refuse: a request with an unknown field is an error. warn: the field is ignored, and the answer's header
    x-penstock-ignored-fields names it; for clients that cannot be changed."""
    max_live_requests: int = 256
    """Requests between first and last byte; more are answered with 503 at once."""
    max_body_bytes: Size = 16 * 1024 * 1024
    """Longest HTTP body."""
    max_upload_bytes: Size = 256 * 1024 * 1024
    """All HTTP bodies together while they arrive; requests whose body finds no room are answered with 503."""
    max_n: int = 16
    """Choices per request, over all its prompts."""
    max_output_tokens: int = 131_072
    """Most tokens of one answer: max_tokens is lowered to it, and to the room in the model's context."""
    request_timeout_s: float = 600.0
    """A request's whole life."""
    failover_s: float = 30.0
    """How long a request may go without a token while no worker, or no router, takes it; 0: not at all."""
    max_sessions: int = 1024
    """Sessions whose last prompts and answers are remembered."""
    max_session_tokens: int = 4_000_000
    """Tokens of all remembered sessions together, about 12 bytes each."""
    max_tenant_session_tokens: int = 2_000_000
    """Tokens of one tenant's remembered sessions."""
    volatile_lines: str = "keep"
    """Lines at the head of a system prompt that change with every request, such as the time or a request's id: keep
    them, move them behind the system prompt, or drop them, so that what follows is found in the cache."""
    volatile_pattern: str = ""
    """A regular expression for further such lines, besides the known ones."""
    ping_s: float = 15.0
    """A stream that is silent for this long gets a comment, so that no proxy on its way gives up."""
    drain_s: float = 5.0
    """Grace for running requests at the end."""
    metrics_address: OptionalAddress = None
    """Where Prometheus may read besides GET /metrics, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        if not self.model_dir.is_dir():
            raise ConfigError("model_dir", str(self.model_dir), "must be the directory of the served model")
        addresses(self, "router", "http_address", "grpc_address")
        optional_addresses(self, "metrics_address")
        at_least(self, 1, "max_live_requests", "max_body_bytes", "max_upload_bytes", "max_n", "max_output_tokens")
        more_than(self, 0, "request_timeout_s", "ping_s")
        at_least(self, 0, "failover_s", "max_sessions", "max_session_tokens", "max_tenant_session_tokens", "drain_s")
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
        if self.server_key and self.server_key_file:
            raise ConfigError("server_key_file", str(self.server_key_file), "must be empty where server_key is set")

    @property
    def served_name(self) -> str:
        """The model's public name."""
        return self.model_name or self.model_dir.resolve().name
