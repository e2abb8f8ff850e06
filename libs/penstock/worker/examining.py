"""What a worker finds where it runs, for `penstock ctl doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.engine.engine import Engine
from penstock.engine.kernels.cpu.shapes import misfit
from penstock.kv.client.client import StoreClient
from penstock.runtime.findings import Finding, shared_memory


async def examined(engine: Engine, store: StoreClient, *, has_store: bool) -> Sequence[Finding]:
    """Who computes, whether there is shared memory, and whether the store is there, if there is to be one."""
    return [_kernels(engine), await asyncio.to_thread(shared_memory), *([_store(store)] if has_store else [])]


def _kernels(engine: Engine) -> Finding:
    if engine.config.device != "cpu":
        return Finding("kernels", True, f"computes on {' and '.join(engine.config.devices)}")
    if engine.packed is not None:
        return Finding("kernels", True, "compiled for this processor")
    if reason := misfit(engine.checkpoint.config):
        return Finding("kernels", True, f"torch computes everything: {reason}")
    right = (
        "install g++ or clang++ and run `python -m penstock.engine.kernels.cpu.build`, then start the worker again;"
        " the worker's log says why there are none"
    )
    return Finding("kernels", False, "there are none: torch computes everything", right)


def _store(store: StoreClient) -> Finding:
    if store.connected:
        return Finding("store", True, "attached")
    right = "start the store, or let this worker reach it at the address of its --kvstore; it attaches by itself"
    return Finding("store", False, "this worker is attached to no store: it computes everything", right)
