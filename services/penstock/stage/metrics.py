"""What a scrape of a stage's host says."""

from __future__ import annotations

from penstock.runtime.metrics import Metrics


class StageMetrics(Metrics):
    """What a host of a stage does for its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = self._counter("penstock_stage_workers", "Workers for which a stage was computed, one at a time")
        self.waiting = self._gauge("penstock_stage_workers_waiting", "Workers that wait until another one has ended")
        self.received = self._counter("penstock_stage_received_bytes", "Bytes of workers: steps, pages, hidden states")
        self.sent = self._counter("penstock_stage_sent_bytes", "Bytes to workers: KV, hidden states, logits")
