"""The device tier in the whole mesh, over a twin of a device: the same tokens, and where they came from."""

from __future__ import annotations

import pytest

from penstock.engine.request import SamplingParams
from penstock.kvstore import service as store_service
from penstock.kvstore.tiers.device.opening import open_device_tier
from penstock.testing.mesh import MeshSetup
from penstock.testing.twin import TwinDevice
from penstock.worker import opening as worker_module

from .support import BLOCK, ask, forget_pages, prompt, settled, until

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LENGTH = 20 * BLOCK + 5


@pytest.mark.parametrize("workers", ["on-the-device", "through-host-memory"])
async def test_a_session_that_lives_on_the_device(monkeypatch, tiny, meshes, http, oracle, workers):
    def open_twin(*given, **named):
        return open_device_tier(*given, **(named | {"open_device": TwinDevice}))

    monkeypatch.setattr(store_service, "open_device_tier", open_twin)
    if workers == "on-the-device":
        monkeypatch.setattr(worker_module, "device_of", lambda _: TwinDevice())
    tokens = prompt(f"device/{workers}", LENGTH)
    expected = await oracle(tokens, GREEDY)
    async with meshes(MeshSetup(model=tiny, store={"gpu_bytes": 8 << 20}, aggregated=True)) as mesh:
        store = mesh.kvstore
        first = await ask(http, mesh, tokens, GREEDY, "s")
        assert (first.ids, first.cached) == (expected.ids, 0)
        await settled(mesh, tokens[: 20 * BLOCK])
        await forget_pages(mesh)
        second = await ask(http, mesh, tokens, GREEDY, "s")
        assert (second.ids, second.usage["penstock"]["cached_tokens"]["host"]) == (expected.ids, 20 * BLOCK)
        await until(lambda: store.gpu.stats().promoted >= 20 and not store.gpu.working, "its blocks go up")
        await forget_pages(mesh)
        third = await ask(http, mesh, tokens, GREEDY, "s")
        assert (third.ids, third.cached) == (expected.ids, 20 * BLOCK)
        read_there = 20 * BLOCK if workers == "on-the-device" else 0
        assert third.usage["penstock"]["cached_tokens"].get("gpu", 0) == read_there
        assert store.gpu.stats().hits == read_there // BLOCK
        table = store.host.table
        while (victim := table.victims.hold(store.store.now())) is not None:
            table.victims.discard(victim, store.store.now())
        assert table.stats().blocks == 0, "host memory has nothing"
        await forget_pages(mesh)
        fourth = await ask(http, mesh, tokens, GREEDY, "s")
        assert fourth.ids == expected.ids
        assert fourth.usage["penstock"]["cached_tokens"]["gpu"] == 20 * BLOCK
        assert store.gpu.stats().supplied == 20 - read_there // BLOCK
