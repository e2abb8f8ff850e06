"""What a store finds where it runs, for `penstock ctl doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.messages import Reports
from penstock.kvstore.table.blocks import TierKind
from penstock.runtime.capacity import memory_bytes
from penstock.runtime.config import format_size
from penstock.runtime.findings import Finding, disk, shared_memory


async def examined(config: KvStoreConfig, reports: Reports) -> Sequence[Finding]:
    """Shared memory for the arena, and the disk with what the tier says of it."""
    findings = [_memory(config), await asyncio.to_thread(shared_memory)]
    if config.nvme_dir is not None and TierKind.NVME in reports:
        figures = reports[TierKind.NVME]()
        found = await asyncio.to_thread(disk, config.nvme_dir, config.nvme_bytes, int(figures.get("used_bytes", 0)))
        if found.ok and not (figures.get("reading", 1) and figures.get("writing", 1)):
            right = "look into the store's log for the reason; it tries again by itself, at least once a minute"
            found = Finding("disk", False, f"the tier leaves the disk alone for now; {found.found}", right)
        findings.append(found)
    return findings


def _memory(config: KvStoreConfig) -> Finding:
    wanted, there = config.host_bytes + config.draft_bytes, memory_bytes()
    found = f"{format_size(wanted)} for blocks, of {format_size(there >> 20 << 20)} that this process may use"
    if wanted > there:
        return Finding("memory", False, found, "lower --host-bytes, or give the process more memory")
    return Finding("memory", True, found)
