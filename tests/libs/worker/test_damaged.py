"""KV of a request whose logits are not finite stays in the worker: the store would fail every later request with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import NotFinite
from penstock.engine.request import Request, SamplingParams
from penstock.errors import Internal
from penstock.kv.client.client import NOBODY, BlockPut, Origin
from penstock.kv.identity import block_keys
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.worker.order import Order
from penstock.worker.publishing import open_publisher
from penstock.worker.stored import StoredKeys
from penstock.worker.worker import Worker

SPOILT, SPOILT_AT, SIZE = 77, 37, 16
ROOT = b"r" * 32
PROMPT = tuple(1 + 7 * at % 70 for at in range(150))
DAMAGED = (*PROMPT[:SPOILT_AT], SPOILT, *PROMPT[SPOILT_AT:])


@dataclass
class Store:
    """Takes all blocks."""

    connected: bool = True
    attachment: str = "one"
    taken: dict[bytes, bytes] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, blocks: Sequence[BlockPut], origin: Origin) -> int:
        await self.gate.wait()
        self.taken |= {block.key: bytes(block.data) for block in blocks}
        return len(blocks)


def damaged(directory: Any, name: str, place: Any, value: float) -> Any:
    """A model with one weight that is not a number."""
    model = write_checkpoint(directory / "model", TinyModel())
    tensors = load_file(model / "model.safetensors")
    tensors[name][place] = value
    save_file(tensors, model / "model.safetensors")
    return model


class NoStore:
    """A source that has nothing."""

    async def load(self, pages: Any) -> int:
        return 0


async def run(config: EngineConfig, prompt: tuple[int, ...], store: Store) -> tuple[list[bytes], Exception | None]:
    """Serves one request as a worker does, and waits until its blocks are stored or given up; the keys of its blocks,
    and its error."""
    error: Exception | None = None
    metrics = WorkerMetrics()
    async with (
        asyncio.timeout(60),
        Engine.open(config) as engine,
        open_publisher(
            store,  # type: ignore[arg-type]
            metrics,
            64,
            known=StoredKeys(store, engine.pool, metrics),  # type: ignore[arg-type]
            finite=engine.finite,
        ) as publisher,
    ):
        worker: Any = Worker(
            SimpleNamespace(claim_s=0.03, fetch_wait_s=0.0, seal=False, picture_bytes=0),  # type: ignore[arg-type]
            engine,
            store=store,  # type: ignore[arg-type]
            publisher=publisher,
            channels=None,  # type: ignore[arg-type]
            metrics=metrics,
        )
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        order = Order(request=Request("one", prompt, sampling), cache_root=ROOT, origin=NOBODY)
        work = worker.work(order)
        try:
            async for _ in worker.generate(order.request, work, NoStore()):
                pass
        except Internal as caught:
            error = caught
        store.gate.set()
        while work.sink._pending:
            work.sink.changed.clear()
            await work.sink.changed.wait()
    return block_keys(ROOT, prompt, SIZE), error


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"dtype": "float32"}, np.nan),
        ({"dtype": "bfloat16"}, np.inf),
        ({"dtype": "float32", "kernels": False}, np.nan),
        ({"dtype": "bfloat16", "kernels": False}, np.nan),
    ],
)
async def test_blocks_that_a_bad_number_reached_are_not_published(tmp_path, settings, value):
    """The prompt takes several steps, so that its blocks are ready for the store long before its logits are known."""
    model = damaged(tmp_path, "model.embed_tokens.weight", (SPOILT, 3), value)
    config = EngineConfig(model=model, kv_pool_tokens=1024, threads=1, max_batch_tokens=32, max_running=1, **settings)
    store = Store()
    store.gate.set()
    keys, error = await run(config, PROMPT, store)
    assert error is None and set(keys) <= set(store.taken), "without that token all is well"
    store = Store()
    store.gate.set()
    keys, error = await run(config, DAMAGED, store)
    assert isinstance(error.__cause__, NotFinite)
    sound = SPOILT_AT // SIZE
    assert set(store.taken) <= set(keys[:sound])


async def test_int8_kv_that_was_made_from_bad_numbers_is_not_published(tmp_path):
    """Its bytes are always numbers: a vector of NaN is kept as zeros, with a scale that says so."""
    model = damaged(tmp_path, "model.embed_tokens.weight", (SPOILT, 3), np.nan)
    config = EngineConfig(
        model=model, kv_pool_tokens=1024, threads=1, max_batch_tokens=32, max_running=1, dtype="int8", kv_dtype="int8"
    )
    store = Store()
    store.gate.set()
    keys, _ = await run(config, DAMAGED, store)
    assert set(store.taken) <= set(keys[: SPOILT_AT // SIZE])


async def test_what_waits_for_the_store_when_the_logits_turn_out_bad_is_not_published(tmp_path):
    """A damaged last norm leaves the KV finite; but nobody knows what else is wrong with this request."""
    model = damaged(tmp_path, "model.norm.weight", 5, np.nan)
    config = EngineConfig(model=model, kv_pool_tokens=1024, threads=1, max_batch_tokens=32, max_running=1)
    store = Store()
    keys, error = await run(config, PROMPT, store)
    assert isinstance(error.__cause__, NotFinite)
    assert set(store.taken) <= set(keys[:2]), "only the batch that was at the store already"
