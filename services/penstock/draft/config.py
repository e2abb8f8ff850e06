"""Settings of the draft service."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    HostPort,
    OptionalAddress,
    addresses,
    at_least,
    one_of,
    optional_addresses,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A draft service. `model` is the only setting without a default."""

    model: str
    """A Hugging Face model directory, or ngram."""
    address: Address = HostPort("127.0.0.1:0")
    """Where to listen; port 0 picks one."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    threads: int = 1
    """Threads of one model step."""
    max_sequences: int = 256
    """Sequences with KV of their own; the least recently used make room."""
    max_streams: int = 64
    """Decode workers served at once."""
    max_stream_sequences: int = 1024
    """Sequences of one decode worker at a time."""
    max_stream_tokens: int = 1 << 22
    """Tokens of one decode worker's sequences together, 4 bytes of memory each."""
    metrics_address: OptionalAddress = None
    """Where Prometheus may read, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        addresses(self, "address")
        optional_addresses(self, "metrics_address")
        at_least(self, 1, "threads", "max_sequences", "max_streams", "max_stream_sequences", "max_stream_tokens")
        one_of(self, LOG_LEVELS, "log_level")
