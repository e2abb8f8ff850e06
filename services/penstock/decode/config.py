"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.runtime.config import ConfigError
from penstock.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A worker that decodes, and prefills what the router asks it to."""

    role: Literal["decode", "both"] = "decode"
    """both: the router may give this worker whole requests (aggregated mode)."""
    draft: str = "none"
    """The draft service's address, or none."""
    draft_tokens: int = 4
    """Most tokens to ask the draft service for, per sequence and step."""
    draft_timeout_s: float = 0.05
    """A step goes on without drafts after this long."""

    def __post_init__(self) -> None:
        super(DecodeConfig, self).__post_init__()
        if not 1 <= self.draft_tokens <= 32:
            raise ConfigError("draft_tokens", self.draft_tokens, "use 1 to 32")
        if self.draft_timeout_s <= 0:
            raise ConfigError("draft_timeout_s", self.draft_timeout_s, "must be positive")
