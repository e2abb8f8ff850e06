"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A worker that prefills."""

    handoff_wait_s: float = 10.0
    """How long a decode worker's call waits for the gateway's."""
    handoff_keep_s: float = 10.0
    """How long a finished hand-off waits for its decode worker."""
