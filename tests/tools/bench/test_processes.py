"""A process that the kv bench talks to is ready, or the bench says why not."""

from __future__ import annotations

import pytest

from penstock.bench.kv.processes import private_bytes, started, store_process


async def test_a_store_is_ready_with_its_address() -> None:
    async with store_process(64 << 20) as (pid, address):
        assert address.rpartition(":")[2].isdigit() and private_bytes(pid) > 0


async def test_a_process_that_ends_at_once_is_quoted() -> None:
    with pytest.raises(RuntimeError, match=r"did not start: .*no-such-option"):
        async with started("penstock.kvstore", "--no-such-option"):
            pass
