"""Settings of the draft service."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A draft service. `model` is the only setting without a default."""

    model: str
    """A Hugging Face model directory, or ngram."""
    address: str = "127.0.0.1:0"
    """Where to listen; port 0 picks one."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    threads: int = 1
    """Threads of one model step."""
    max_sequences: int = 256
    """Sequences with KV of their own; the least recently used make room."""
    max_streams: int = 64
    """Decode workers served at once."""
    metrics_address: str = ""
    """Where Prometheus may read, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        for field in ("threads", "max_sequences", "max_streams"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
