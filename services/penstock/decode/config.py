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
    """both: the router may give this worker whole requests (aggregated mode)."""
    draft: str = "none"
    """The draft service's address, or none."""

    def __post_init__(self) -> None:
        super(DecodeConfig, self).__post_init__()
        if self.draft not in ("", "none"):
            addresses(self, "draft")
