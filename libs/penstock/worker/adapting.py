"""What routers are told of a worker's adapters, and what the worker does with them when a router says so."""

from __future__ import annotations

from pathlib import Path

import structlog

from penstock.checkpoint import CheckpointError
from penstock.engine.adapters.shelf import AdapterRefused
from penstock.engine.config import adapter_name_misfit
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineError
from penstock.v1 import router_pb2
from penstock.worker.worker import Worker

_LOG = structlog.get_logger("penstock.worker")


def adapters_of(engine: Engine) -> list[router_pb2.Adapter]:
    """Those that requests may have, by name."""
    return [
        router_pb2.Adapter(name=name, fingerprint=fingerprint, directory=str(engine.adapters.directory(name)))
        for name, fingerprint in sorted(engine.adapters.names.items())
    ]


async def adapted(worker: Worker, order: router_pb2.AdapterOrder) -> router_pb2.AdapterDone:
    """Loads or unloads an adapter. What is wrong with it stands in the answer and in the log."""
    shelf, error = worker.engine.adapters, adapter_name_misfit(order.name)
    if error is None and not order.directory:
        error = None if shelf.remove(order.name) else f"no adapter {order.name!r} is loaded"
    elif error is None:
        try:
            await shelf.add(order.name, Path(order.directory))
        except (CheckpointError, AdapterRefused, EngineError) as refused:
            error = str(refused)
    worker.changed.set()
    what = "loaded" if order.directory else "unloaded"
    if error is None:
        _LOG.info(f"an adapter is {what}", adapter=order.name, there=len(shelf.names))
    else:
        _LOG.warning(f"an adapter is not {what}", adapter=order.name, reason=error)
    return router_pb2.AdapterDone(number=order.number, error=error or "")
