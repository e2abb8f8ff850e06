"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A worker that prefills."""

    handoff_wait_s: float = 10.0
    """Seconds that a decode worker's request for a hand-off waits for the gateway's request to arrive."""
    handoff_keep_s: float = 10.0
    """Seconds that a finished hand-off is kept for its decode worker."""
