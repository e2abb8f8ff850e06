"""A worker whose first role is to decode, or to do both."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from penstock.decode.config import DecodeConfig
from penstock.v1 import router_pb2
from penstock.worker.opening import ServedWorker
from penstock.worker.serving.both import open_both


def open_decode(config: DecodeConfig) -> AbstractAsyncContextManager[ServedWorker]:
    """Serves decode, and what its later roles ask for, until the block ends."""
    return open_both(config, router_pb2.ROLE_BOTH if config.role == "both" else router_pb2.ROLE_DECODE)
