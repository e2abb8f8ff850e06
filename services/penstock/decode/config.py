"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.runtime.config import addresses
from penstock.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A worker that decodes, and prefills what the router asks it to."""

    role: Literal["decode", "both"] = "decode"
    """decode, or both: then the router may give this worker whole requests, prefill included (aggregated mode)."""
    draft: str = "none"
    """Address of the draft service, host:port, or none."""

    def __post_init__(self) -> None:
        super(DecodeConfig, self).__post_init__()
        if self.draft not in ("", "none"):
            addresses(self, "draft")
