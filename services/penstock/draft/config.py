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
    """A Hugging Face model directory, or ngram for guesses from the text itself."""
    address: Address = HostPort("127.0.0.1:0")
    """Address to listen on, host:port; port 0 picks a free port."""
    dtype: str = "auto"
    """Type of the weights: auto, float32 or bfloat16. auto: the checkpoint's own, and bfloat16 for one in float16."""
    threads: int = 1
    """Threads that compute one step."""
    max_sequences: int = 256
    """Most sequences whose KV is kept; the one that was used longest ago makes room."""
    max_streams: int = 64
    """Most decode workers that are served at once."""
    max_stream_sequences: int = 1024
    """Most sequences of one decode worker at a time."""
    max_stream_tokens: int = 1 << 22
    """Most tokens in all sequences of one decode worker together; each takes 4 bytes of memory."""
    metrics_address: OptionalAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        addresses(self, "address")
        optional_addresses(self, "metrics_address")
        at_least(self, 1, "threads", "max_sequences", "max_streams", "max_stream_sequences", "max_stream_tokens")
        one_of(self, LOG_LEVELS, "log_level")
