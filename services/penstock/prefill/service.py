"""A worker whose first role is to prefill."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from penstock.prefill.config import PrefillConfig
from penstock.v1 import router_pb2
from penstock.worker.opening import ServedWorker
from penstock.worker.serving.both import open_both


def open_prefill(config: PrefillConfig) -> AbstractAsyncContextManager[ServedWorker]:
    """Serves prefill, and what its later roles ask for, until the block ends."""
    return open_both(config, router_pb2.ROLE_PREFILL)
